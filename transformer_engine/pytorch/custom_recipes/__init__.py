"""Parts for custom recipes, for `recipe.CustomRecipe(qfactory=..)`.

| module | contents |
| --- | --- |
| `quantizer_factories` | a factory for each built-in recipe |
| `quantizer_factory_zoo` | factories that combine formats: forward and backward passes, weights, attention |
| `reference_current_scaling`, `reference_nvfp4` | quantizers in literal PyTorch operations |
| `gemm` | products of operands that custom quantizers make |

Names from NVIDIA's earlier releases, such as `quantization_nvfp4`, are the same modules.
"""

import sys

from ...common import absent
from . import gemm, reference_current_scaling, reference_nvfp4

# Importing a submodule first imports this package, and then finds these entries.
for _former, _module in {
    "quantization": gemm,
    "quantization_current_scaling": reference_current_scaling,
    "quantization_nvfp4": reference_nvfp4,
}.items():
    sys.modules[f"{__name__}.{_former}"] = globals()[_former] = _module

absent.install_getter(__name__)
