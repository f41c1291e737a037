"""Steps of optimizers as data, whatever the framework."""

from __future__ import annotations

from typing import NamedTuple


class Adam(NamedTuple):
    """How Adam steps parameters.

    decoupled   weight decay goes to the parameter (AdamW), not into the gradient
    """

    decoupled: bool = True


class Sgd(NamedTuple):
    """How gradient descent steps parameters.

    momentum   is it used? A first step begins with the gradient
    late       weight decay comes after the momentum
    """

    momentum: bool = False
    nesterov: bool = False
    first: bool = False
    late: bool = False
