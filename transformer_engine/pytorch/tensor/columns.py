"""Column-wise codes of a weight whose row-wise ones were written without them: that they are out of date, and anew.

The mark is an attribute of the tensor, which its aliases and copies have too. Who asks for column-wise codes
(`update_usage`) has them made first.
"""

from __future__ import annotations

from typing import Any

OUT_OF_DATE = "_columns_out_of_date"  # the attribute of a weight that is marked; others lack it


def mark_columns(weight: Any) -> None:
    """Say that the column-wise codes are no longer those of the row-wise ones; of a weight that has none, nothing."""
    if weight.transposable and weight.get_usages()["columnwise"]:
        setattr(weight, OUT_OF_DATE, True)


def remake_columns(weight: Any) -> None:
    """Make column-wise codes from the row-wise ones, in the tensors of those that are there."""
    vars(weight).pop(OUT_OF_DATE, None)
    usages = weight.get_usages()
    if not (usages["rowwise"] and usages["columnwise"]):
        weight.update_usage(columnwise_usage=True)
        return
    fresh = weight.drop(columnwise=True)
    fresh.update_usage(columnwise_usage=True)
    for name in weight._dropped(rowwise=False, columnwise=True):
        made, old = getattr(fresh, name), getattr(weight, name)
        if old is None or old.shape != made.shape:
            setattr(weight, name, made)
        else:
            # Through `.data`: autograd would refuse what it saved before as modified, which is the purpose.
            old.data.copy_(made)
