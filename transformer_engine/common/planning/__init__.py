"""Predicts time and memory of training steps on many devices: `plan` and `search`, see `planner`."""

from .hardware import FORMATS as FORMATS
from .hardware import GPUS as GPUS
from .hardware import Gpu as Gpu
from .hardware import Links as Links
from .models import MODELS as MODELS
from .models import ModelShape as ModelShape
from .planner import plan as plan
from .planner import search as search
from .report import Mesh as Mesh
from .report import TrainingPlan as TrainingPlan
