"""Stateless maths on plain tensors: one folder an operation, one file a backend, no autograd."""

from __future__ import annotations

import torch

from ...common import dispatch

dispatch.trace_when(torch.compiler.is_compiling)
