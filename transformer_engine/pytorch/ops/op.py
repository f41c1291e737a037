"""Operations under the original's module path."""

from .operation import BasicOperation as BasicOperation
from .operation import FusedOperation as FusedOperation
from .operation import FusibleOperation as FusibleOperation
from .operation import OperationContext as OperationContext
