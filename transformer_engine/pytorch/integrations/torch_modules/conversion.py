"""te.convert(model, recipe=.., sample=..): torch.nn modules in any model use this engine where that is faster."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from ....common.checks import described, suggests_keywords
from ....common.numbers import to_bool
from ....common.recipe import Recipe
from ...quantization.support import check_block
from .attention import (
    EngineAttention,
    convert_attention,
    has_engine_attention,
    restore_attention,
    unsupported_module,
)
from .eligibility import (
    Eligibility,
    Filter,
    candidates,
    check_filter,
    check_recipe,
    passes_filters,
)
from .experts import (
    compare_experts,
    convert_experts,
    has_engine_experts,
    restore_experts,
    unsupported_sizes,
)
from .layers import CONVERTED, Converter, restore_module
from .sample import (
    Sample,
    SampleCall,
    SampleCalls,
    is_sharded,
    iterate_tensors,
    preserve_state,
    record,
    run,
)
from .table import ConversionTable, LayerChoice
from .timing import Comparison, compare, time_functions, time_steps, wait_for_device

M = TypeVar("M", bound=nn.Module)

# A converted module is used if it takes at most this share of the original's time; smaller differences are noise.
MARGIN = 0.98
_TABLE = "_te_conversion"


@suggests_keywords
def convert(
    model: M,
    recipe: Recipe | None = None,
    *,
    sample: Sample | None = None,
    include: Filter = None,
    exclude: Filter = None,
    convert_outputs: bool = False,
    compiled: bool | None = None,
    timed: bool | None = None,
    verbose: bool = True,
) -> M:
    """Let the linear layers, norms, attention and grouped experts in a model compute with this engine, in place.

    Modules, parameters, hooks and state-dict keys remain the same objects, so optimizers, checkpoints, FSDP2, adapters
    and `torch.compile` work as before. `restore` undoes the conversion; `conversion_table` returns the choices.

    With a sample on a GPU, each distinct layer is timed forward and backward at the sample's shapes, and the original
    is kept where the engine is not faster. Then the whole model is timed, and restored if it became slower. Without a
    sample, and on a CPU, nothing is timed: every supported linear layer and norm is converted, and attention is not.

    Args:
        model: Any module, compiled or not, sharded by `fully_shard` or not.
        recipe: Linear layer recipe, without history. None: high precision, or the caller's `te.autocast`.
        sample: A tensor, an argument tuple, a keyword argument dict, or a function `sample(model)`,
            for example one that returns the loss. It runs once, and is timed with `timed`. Gradients, buffers and
            random states remain as they were.
        include: Module names to convert: a pattern ("layers.*.mlp.*"), several, or a function
            `include(name, module)`. None: all.
        exclude: Module names to leave, likewise.
        convert_outputs: Also convert linear layers that compute an output of the model, cross-entropy logits, or the
            scores by which `topk` chooses experts.
        compiled: The model runs under `torch.compile`, which fuses norms with their neighbors:
            norms are not converted. None: whether the model, or any of its modules, was compiled
            already. Only then is the whole model timed compiled.
        timed: Time the layers and the model; None: on a GPU, with a sample.
        verbose: Print the table.

    Returns:
        The model.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The recipe has a history, the model is converted already, or `timed` has no sample.
        RuntimeError: The machine does not support the recipe.
    """
    _check_arguments(model, recipe, include, exclude)
    timed = _times(model, sample, timed)
    convert_outputs = to_bool("convert_outputs", convert_outputs)
    compiled = (
        any(map(_is_compiled, model.modules()))
        if compiled is None
        else to_bool("compiled", compiled)
    )
    eligibility = Eligibility(model, recipe, include, exclude)
    modules = dict(candidates(model))
    reasons = {
        name: eligibility.unsupported_reason(name, module) for name, module in modules.items()
    }
    recorded = None if sample is None else record(model, sample, modules)
    chooser = _Chooser(Converter(recipe), recorded, timed, convert_outputs, compiled)
    rows = [chooser.choice(name, module, reasons[name]) for name, module in modules.items()]
    experts = chooser.experts(model, include, exclude)
    rows += [*chooser.attention(model, include, exclude), *experts]
    rows += _list_stacked_experts(model, {row.name for row in experts})
    before = _model_ms(model, sample) if timed else None
    rule = _rule(timed, sample is not None)
    if before is None:
        # A model in shards is not timed, and may be limited by its host.
        table = ConversionTable(_by_host_time(rows) if timed and not compiled else rows, rule)
        _convert_rows(model, table.rows, chooser.converter)
    else:
        plans = [rows, _every_linear(rows) if compiled else _by_host_time(rows)]
        table = _convert_to_fastest(model, sample, before, plans, chooser.converter)
        table.summary = f"{rule}\n{table.summary}".rstrip()
    model.__dict__[_TABLE] = table
    if verbose:
        print(table)
    return model


def restore(model: M) -> M:
    """Undo `convert`: modules have their classes and attributes from before, and compute the same bits.

    Args:
        model: A converted model, a part of one, or a module that wraps one, such as `torch.compile`
            and peft results. Parameters keep their present values.

    Raises:
        ValueError: No module in the model is converted, `fully_shard` wrapped a converted module, or one is
            parametrized.
    """
    if not any(map(_is_converted, model.modules())):
        raise ValueError(f"{type(model).__name__} is not converted; there is nothing to restore")
    for name, module in model.named_modules():
        if not isinstance(module, CONVERTED) or type(module) in CONVERTED:
            continue
        if nn.utils.parametrize.is_parametrized(module):
            raise ValueError(
                f"{name} is parametrized; remove its parametrizations before the model is restored, by "
                f"torch.nn.utils.parametrize.remove_parametrizations for {_parametrized_names(module)}"
            )
        raise ValueError(
            f"{name} is {type(module).__name__}; restore the model before it is sharded"
        )
    _restore(model)
    for module in model.modules():
        module.__dict__.pop(_TABLE, None)
    return model


def conversion_table(model: nn.Module) -> ConversionTable:
    """Return the choices of `convert` for each module in a converted model.

    Args:
        model: A model that `convert` converted.

    Raises:
        ValueError: The model is not converted.
    """
    if _TABLE not in vars(model):
        raise ValueError(f"{type(model).__name__} is not converted; call convert(model) first")
    return vars(model)[_TABLE]


def _parametrized_names(module: nn.Module) -> str:
    parametrizations: Any = module.parametrizations
    return ", ".join(parametrizations)


def _is_converted(module: nn.Module) -> bool:
    injected = has_engine_attention(module) or has_engine_experts(module)
    return _TABLE in vars(module) or isinstance(module, CONVERTED) or injected


def _restore(model: nn.Module) -> None:
    for module in model.modules():
        if has_engine_attention(module):
            restore_attention(module)
        if has_engine_experts(module):
            restore_experts(module)
        if type(module) in CONVERTED:
            restore_module(module)


def _check_arguments(
    model: nn.Module, recipe: Recipe | None, include: Filter, exclude: Filter
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={described(model)} is not a torch.nn.Module")
    if _TABLE in vars(model):
        raise ValueError(f"{type(model).__name__} is converted already; call restore(model) first")
    check_block(True, recipe)
    check_recipe(recipe)
    check_filter("include", include)
    check_filter("exclude", exclude)


def _times(model: nn.Module, sample: Any, timed: bool | None) -> bool:
    """Whether layers are timed."""
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    if timed is None:
        return on_gpu and sample is not None
    if to_bool("timed", timed) and sample is None:
        raise ValueError("timed=True has no sample, whose shapes are timed; give sample=batch")
    return bool(timed)


def _rule(timed: bool, sampled: bool) -> str:
    if timed:
        return f"timed forward and backward; converted where the time is at most {MARGIN} of the original's"
    shapes = "the sample" if sampled else "all inputs"
    return (
        f"not timed: linear layers and norms whose format supports {shapes} were converted; time them on a GPU, where "
        "formats are not emulated"
    )


def _convert_rows(model: nn.Module, rows: list[LayerChoice], converter: Converter) -> None:
    named = dict(model.named_modules())
    for row in rows:
        if row.choice == "torch":
            continue
        if row.module == _ATTENTION:
            convert_attention(named[row.name], converter.recipe)
        elif row.module == _EXPERTS:
            convert_experts(named[row.name], converter.recipe)
        else:
            converter.convert(named[row.name])


_ATTENTION, _EXPERTS = "scaled_dot_product_attention", "grouped_mm"


class _Chooser:
    """Choices of one conversion.

    Args:
        converter: Layer converter.
        recorded: Calls of the sample; None without a sample.
        timed: Compare times.
        convert_outputs: Convert the model's output layers too.
        compiled: The model will be compiled.
    """

    def __init__(
        self,
        converter: Converter,
        recorded: SampleCalls | None,
        timed: bool,
        convert_outputs: bool,
        compiled: bool,
    ) -> None:
        self.converter, self.recorded, self.timed = converter, recorded, timed
        self.convert_outputs, self.compiled = convert_outputs, compiled
        recipe = converter.recipe
        self.converted_name = "te" if recipe is None else type(recipe).__name__
        self._compared: dict[tuple[Any, ...], Comparison] = {}

    def choice(self, name: str, module: nn.Module, reason: str | None) -> LayerChoice:
        """Choice for a linear layer or a norm."""
        calls = None if self.recorded is None else self.recorded.calls.get(name)
        described_as = _description(module)
        linear = isinstance(module, nn.Linear)
        if reason is None:
            reason = self._sample_reason(name, linear, calls)
        if reason is not None:
            return LayerChoice(name, described_as, "torch", reason)
        choice = self.converted_name if linear else "te"
        if not self.timed or calls is None:
            return LayerChoice(name, described_as, choice, "supported")
        key = described_as, *_tensor_facts(module), frozenset(calls.items())
        costs = self._costs(key, compare, module, self.converter, calls)
        return _time_choice(name, described_as, choice, costs)

    def _costs(
        self, key: tuple[Any, ...], measure: Callable[..., Comparison], *args: Any
    ) -> Comparison:
        """Costs of the layers with this key, measured once."""
        if key not in self._compared:
            self._compared[key] = measure(*args)
        return self._compared[key]

    def _sample_reason(
        self, name: str, linear: bool, calls: Counter[SampleCall] | None
    ) -> str | None:
        """Reason from the sample, or from the way in which the model will run."""
        if not linear and self.compiled:
            return "torch.compile fuses norms with their neighbors"
        if self.recorded is None:
            return None
        if calls is None:
            return "not called by the sample"
        if linear and name in self.recorded.outputs and not self.convert_outputs:
            return "computes an output of the model; convert_outputs=True converts it"
        if linear and name in self.recorded.routers and not self.convert_outputs:
            return "chooses experts; convert_outputs=True converts it"
        return None

    def attention(self, model: nn.Module, include: Filter, exclude: Filter) -> list[LayerChoice]:
        """Choices for the modules whose forward pass calls scaled_dot_product_attention itself."""
        if self.recorded is None:
            return []
        rows = []
        for name, module, calls in _callers(model, self.recorded.attention):
            reason = None if passes_filters(name, module, include, exclude) else "not selected"
            reason = (
                reason or self.recorded.attention_reasons.get(name) or unsupported_module(module)
            )
            if reason is None and not self.timed:
                reason = "replaced only where it was timed"
            if reason is not None:
                rows.append(LayerChoice(name, _ATTENTION, "torch", reason))
                continue
            costs = self._costs((_ATTENTION, frozenset(calls.items())), _compare_attention, calls)
            rows.append(_time_choice(name, _ATTENTION, "te", costs))
        return rows

    def experts(self, model: nn.Module, include: Filter, exclude: Filter) -> list[LayerChoice]:
        """Choices for the modules whose forward pass calls grouped_mm itself."""
        if self.recorded is None:
            return []
        rows = []
        for name, module, calls in _callers(model, self.recorded.experts):
            reason = self._experts_reason(name, module, include, exclude)
            if reason is not None:
                rows.append(LayerChoice(name, _EXPERTS, "torch", reason))
            elif not self.timed:
                rows.append(LayerChoice(name, _EXPERTS, self.converted_name, "supported"))
            else:
                key = _EXPERTS, frozenset(calls.items())
                costs = self._costs(key, compare_experts, self.converter.recipe, calls)
                rows.append(_time_choice(name, _EXPERTS, self.converted_name, costs))
        return rows

    def _experts_reason(
        self, name: str, module: nn.Module, include: Filter, exclude: Filter
    ) -> str | None:
        assert self.recorded is not None
        if not passes_filters(name, module, include, exclude):
            return "not selected"
        if self.compiled:
            return "torch.compile traces torch's grouped_mm"
        if "forward" in vars(module):
            return "its forward was replaced"
        return self.recorded.experts_reasons.get(name) or unsupported_sizes(
            self.converter.recipe, self.recorded.experts[name]
        )


def _callers(
    model: nn.Module, recorded: dict[str, Counter[SampleCall]]
) -> Iterator[tuple[str, nn.Module, Counter[SampleCall]]]:
    """Names and modules that called a function in the sample, with their calls."""
    named = dict(model.named_modules())
    return ((name, named[name], calls) for name, calls in recorded.items())


def _list_stacked_experts(model: nn.Module, listed: set[str]) -> list[LayerChoice]:
    """Rows for modules with experts in one parameter [experts, .., ..] that do not call grouped_mm in the sample."""
    reason = (
        "its experts are one parameter, and it does not call grouped_mm in a sample; transformers does with "
        'experts_implementation="grouped_mm"'
    )
    return [
        LayerChoice(name, type(module).__name__, "torch", reason)
        for name, module in model.named_modules()
        if name not in listed
        and any(
            p is not None and p.dim() == 3 and min(p.shape) > 1 for p in module._parameters.values()
        )
        and not isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))
    ]


def _compare_attention(calls: Counter[SampleCall]) -> Comparison:
    """Time torch's attention and the engine's for the most frequent call."""
    ((call, _),) = calls.most_common(1)
    grouped = call.shapes[0][1] != call.shapes[1][1]
    engine = EngineAttention(nn.Module(), None)

    options = {"is_causal": call.causal, "enable_gqa": grouped}
    functions = [
        functools.partial(attend, **options) for attend in (F.scaled_dot_product_attention, engine)
    ]
    return Comparison(*time_functions(functions, call))


def _time_choice(name: str, module: str, converted: str, compared: Comparison) -> LayerChoice:
    ratio = compared.converted.ms / compared.original.ms
    choice = converted if ratio <= MARGIN else "torch"
    return LayerChoice(name, module, choice, f"{ratio:.2f} of the time", compared, converted)


def _by_host_time(rows: list[LayerChoice]) -> list[LayerChoice]:
    """Rows without the layers that take longer than the original when the host's launches count."""

    def compare_hosts(row: LayerChoice) -> LayerChoice:
        if row.choice == "torch" or row.costs is None:
            return row
        ratio = row.costs.converted.host_ms / row.costs.original.host_ms
        if ratio <= MARGIN:
            return row
        reason = f"{row.reason}, {ratio:.2f} with the host's launches"
        return dataclasses.replace(row, choice="torch", reason=reason)

    return [compare_hosts(row) for row in rows]


def _every_linear(rows: list[LayerChoice]) -> list[LayerChoice]:
    """Rows with every supported linear layer: a compiler fuses casts with neighbors, and shares them."""
    return [
        dataclasses.replace(
            row, choice=row.converted, reason=f"{row.reason} alone; casts are fused"
        )
        if row.choice == "torch" and row.converted not in ("", "te") and row.module != _EXPERTS
        else row
        for row in rows
    ]


def _description(module: Any) -> str:
    """Class and sizes of a module."""
    if isinstance(module, nn.Linear):
        return f"Linear {module.in_features} -> {module.out_features}"
    shape = ", ".join(str(size) for size in module.normalized_shape)
    return f"{type(module).__name__} {shape}"


def _tensor_facts(module: Any) -> tuple[Any, ...]:
    weight, bias = module.weight, getattr(module, "bias", None)
    return weight.dtype, weight.device, bias is None


def _is_compiled(module: nn.Module) -> bool:
    """Whether a module is a `torch.compile` result, or was compiled in place."""
    return (
        isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
    )


def _model_ms(model: nn.Module, sample: Any) -> float | None:
    """Median milliseconds for the sample, forward and backward; None for a model in shards."""
    if is_sharded(model):
        return None
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> None:
        outputs = run(model, sample)
        roots = [tensor for tensor in iterate_tensors(outputs) if tensor.requires_grad]
        if roots and trainable:
            torch.autograd.grad(
                roots, trainable, [torch.ones_like(root) for root in roots], allow_unused=True
            )

    times = []
    with preserve_state(model), torch.enable_grad():
        for _ in range(8):
            times.append(1e3 * time_steps(step, 1, wait_for_device))
    return sorted(times[3:])[2]


def _convert_to_fastest(
    model: nn.Module,
    sample: Any,
    before: float,
    plans: list[list[LayerChoice]],
    converter: Converter,
) -> ConversionTable:
    """Time the whole model under each plan, and leave it in the fastest; the originals if no plan is faster.

    Args:
        model: The model, not converted.
        sample: The sample.
        before: Milliseconds of the original.
        plans: Choices to compare.
        converter: The converter.
    """
    measured: list[tuple[float, list[LayerChoice]]] = []
    for rows in plans:
        choices = [row.choice for row in rows]
        if set(choices) <= {"torch"} or any(
            choices == [row.choice for row in earlier] for _, earlier in measured
        ):
            continue
        if measured:
            _restore(model)
        _convert_rows(model, rows, converter)
        after = _model_ms(model, sample)
        assert after is not None
        measured.append((after, rows))
    if not measured:
        return ConversionTable(plans[0])
    ms, rows = min(measured, key=lambda pair: pair[0])
    times = ", ".join(f"{after:.3g} ms" for after, _ in measured)
    summary = f"whole model: {before:.3g} ms, converted {times}"
    if len(measured) > 1:
        summary += f" ({len(measured)} choices; the fastest is used)"
    if ms > before:
        _restore(model)
        reason = "the whole model was slower converted"
        rows = [
            row
            if row.choice == "torch"
            else dataclasses.replace(row, choice="torch", reason=reason)
            for row in rows
        ]
        summary += f": {reason}, and was restored"
    elif rows is not measured[-1][1]:
        _restore(model)
        _convert_rows(model, rows, converter)
    return ConversionTable(rows, summary)
