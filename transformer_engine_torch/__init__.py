"""transformer_engine_torch: the flat names that callers of the original's extension module use.

Thin adapters over the primitives of transformer_engine.pytorch.
"""

from transformer_engine.pytorch import requirements  # isort: skip  (reports missing dependencies first)

from transformer_engine.common import absent
from transformer_engine.pytorch.functions.multi_tensor import (
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_adam_fp8,
    multi_tensor_adam_param_remainder,
    multi_tensor_compute_scale_and_scale_inv,
    multi_tensor_compute_scale_inv_e8m0,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)

from . import (
    activation,
    attention,
    cast,
    comm_overlap,
    context_parallel,
    enums,
    gemm,
    group_cast,
    grouped,
    grouped_products,
    kv_cache,
    norm,
    nvfp4_scales,
    partial_cast,
    permutation,
    rope,
    router,
    scaling,
    softmax_and_dropout,
    unavailable,
)
from .activation import *  # noqa: F403
from .attention import *  # noqa: F403
from .cast import *  # noqa: F403
from .comm_overlap import *  # noqa: F403
from .context_parallel import *  # noqa: F403
from .enums import *  # noqa: F403
from .gemm import *  # noqa: F403
from .group_cast import *  # noqa: F403
from .grouped import *  # noqa: F403
from .grouped_products import *  # noqa: F403
from .kv_cache import *  # noqa: F403
from .norm import *  # noqa: F403
from .nvfp4_scales import *  # noqa: F403
from .partial_cast import *  # noqa: F403
from .permutation import *  # noqa: F403
from .rope import *  # noqa: F403
from .router import *  # noqa: F403
from .scaling import *  # noqa: F403
from .softmax_and_dropout import *  # noqa: F403
from .unavailable import *  # noqa: F403

__all__ = [
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_adam_fp8",
    "multi_tensor_adam_param_remainder",
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_compute_scale_inv_e8m0",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
]
__all__ += activation.__all__
__all__ += attention.__all__
__all__ += cast.__all__
__all__ += comm_overlap.__all__
__all__ += context_parallel.__all__
__all__ += enums.__all__
__all__ += gemm.__all__
__all__ += group_cast.__all__
__all__ += grouped.__all__
__all__ += grouped_products.__all__
__all__ += kv_cache.__all__
__all__ += norm.__all__
__all__ += nvfp4_scales.__all__
__all__ += partial_cast.__all__
__all__ += permutation.__all__
__all__ += rope.__all__
__all__ += router.__all__
__all__ += scaling.__all__
__all__ += softmax_and_dropout.__all__
__all__ += unavailable.__all__

absent.install_getters(__name__)
