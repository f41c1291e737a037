"""Channels: names by which an operation's extra output becomes the extra input of a later operation in its chain."""

from __future__ import annotations

from typing import Any

from ...common.numbers import to_int


class Channels:
    """Extra inputs and outputs of a basic operation, and the channels that they are connected to."""

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    _extra_input_channels: list[str | None]
    _extra_output_channels: list[str | None]
    _extra_output_to_caller: list[bool]
    _captured_by_fuser: bool

    def set_extra_input_channel(self, index: int, channel: str | None) -> Any:
        """Read an extra input from the channel of an earlier operation instead of from the caller.

        Args:
            index: Extra input index.
            channel: Channel name; None for an input from the caller.

        Returns:
            The operation.

        Raises:
            IndexError: No extra input has this index.
            ValueError: The name is not a string with characters.
            RuntimeError: A fuser has been built with the operation.
        """
        self._check_channel("input", index, self.num_extra_inputs, channel)
        self._extra_input_channels[index] = channel
        return self

    def set_extra_output_channel(
        self, index: int, channel: str | None, *, output_to_caller: bool = True
    ) -> Any:
        """Offer an extra output to later operations under a name.

        Args:
            index: Extra output index.
            channel: Channel name; None for no channel.
            output_to_caller: Whether the chain also returns the output.

        Returns:
            The operation.

        Raises:
            IndexError: No extra output has this index.
            ValueError: The name is not a string with characters.
            TypeError: `output_to_caller` is not a bool.
            RuntimeError: A fuser has been built with the operation.
        """
        if type(output_to_caller) is not bool:
            raise TypeError(
                f"output_to_caller={output_to_caller!r} is not a bool; use True or False"
            )
        self._check_channel("output", index, self.num_extra_outputs, channel)
        self._extra_output_channels[index] = channel
        self._extra_output_to_caller[index] = output_to_caller
        return self

    def accept_extra_input(self, index: int, value: Any) -> Any:
        """Return an extra input that the caller gave as another type than a tensor, converted to a tensor.

        Args:
            index: Extra input index.
            value: The caller's value; without an override it is returned unchanged.
        """
        return value

    def fix_channels(self) -> None:
        """Make later changes of the channels an error, because a fuser or a container has read them."""
        # An assignment would change `_revision`, and thereby the key of later calls.
        object.__setattr__(self, "_captured_by_fuser", True)

    def _check_channel(self, kind: str, index: int, count: int, name: Any) -> None:
        if self._captured_by_fuser:
            raise RuntimeError(
                f"the extra {kind} channels of {type(self).__name__} are fixed, because a call has read them; "
                "set channels before the first forward pass"
            )
        index = to_int("index", index)
        if not 0 <= index < count:
            raise IndexError(
                f"extra {kind} {index} does not exist: {type(self).__name__} has {count} extra {kind}s"
            )
        if name is not None and (not isinstance(name, str) or not name):
            raise ValueError(
                f"channel name {name!r} must be a non-empty string, or None for no channel"
            )
