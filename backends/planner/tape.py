"""A tape of tensor operations, replayed forward and backward for the bytes alive at its peak.

The replay follows PyTorch's autograd: an output lives while a later operation reads it or has saved
it; backward runs in reverse, allocates a gradient for each input that needs one, then drops what
the operation had saved and the gradient of its output; a second gradient of a tensor is added in
place if nobody else holds the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Operation:
    inputs: tuple[int, ...]
    output: int
    saved: tuple[int, ...]
    saved_bytes: int
    """Saved beside values of the tape: masks, statistics, casts of weights."""

    passes_gradient: bool
    """The gradient of the output *is* that of the inputs: an addition, a view, work in place."""

    forward_bytes: int
    backward_bytes: int
    """Alive only while the operation runs."""

    weight_gradient: int
    """Bytes of the weight gradient that its backward leaves."""


@dataclass(frozen=True)
class Replay:
    """What a tape needs, in bytes; the incoming gradient and the output are counted."""

    saved: int
    """Alive between forward and backward, without the output unless an operation saved it."""

    forward: int
    """Peak of the forward pass."""

    backward: int
    """Peak of the backward pass."""

    weight_gradients: int
    """Of these at the backward peak, gradients of weights."""


@dataclass
class Tape:
    """Values are numbered; value 0 is the input."""

    sizes: list[int] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)

    def value(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def run(
        self,
        inputs: Sequence[int],
        size: int,
        *,
        saved: Sequence[int] = (),
        saves_output: bool = False,
        saved_bytes: int = 0,
        passes_gradient: bool = False,
        forward_bytes: int = 0,
        backward_bytes: int = 0,
        weight_gradient: int = 0,
    ) -> int:
        """Append an operation and return its output, a new value of ``size`` bytes."""
        output = self.value(size)
        kept = (*saved, output) if saves_output else tuple(saved)
        operation = Operation(
            inputs=tuple(inputs),
            output=output,
            saved=kept,
            saved_bytes=saved_bytes,
            passes_gradient=passes_gradient,
            forward_bytes=forward_bytes,
            backward_bytes=backward_bytes,
            weight_gradient=weight_gradient,
        )
        self.operations.append(operation)
        return output


def replay(tape: Tape, *, input_is_kept: bool, output_is_kept: bool = True) -> Replay:
    """Run ``tape`` once.

    ``input_is_kept``: the input is counted elsewhere (a checkpoint), not here. ``output_is_kept``:
    somebody holds the output until backward ends, as reentrant recomputation does.
    """
    sizes = [0, *tape.sizes[1:]] if input_is_kept else tape.sizes
    holders = [0] * len(sizes)
    for operation in tape.operations:
        for value in operation.saved:
            holders[value] += 1
    saved, forward = _forward(tape, sizes, holders)
    output = len(sizes) - 1
    kept = output_is_kept and not holders[output]
    start = saved + (sizes[output] if kept else 0)
    backward, gradients = _backward(tape, sizes, holders, start)
    return Replay(saved, forward, max(backward, forward), gradients if backward >= forward else 0)


def _forward(tape: Tape, sizes: Sequence[int], holders: Sequence[int]) -> tuple[int, int]:
    """(bytes saved, peak)."""
    readers = [0] * len(sizes)
    for operation in tape.operations:
        for value in operation.inputs:
            readers[value] += 1
    alive = sizes[0]
    peak = alive
    for operation in tape.operations:
        alive += sizes[operation.output] + operation.saved_bytes
        peak = max(peak, alive + operation.forward_bytes)
        for value in operation.inputs:
            readers[value] -= 1
            if not readers[value] and not holders[value]:
                alive -= sizes[value]
        if not readers[operation.output] and not holders[operation.output]:
            alive -= sizes[operation.output]
    return alive, peak


def _backward(
    tape: Tape, sizes: Sequence[int], holders: Sequence[int], start: int
) -> tuple[int, int]:
    """(peak, weight gradients in it), from ``start`` bytes and the gradient of the output."""
    held = list(holders)
    buffers = [tape.sizes[-1]]  # bytes of each gradient buffer
    owners = [1]
    gradient: dict[int, int] = {len(sizes) - 1: 0}
    alive = start + buffers[0]
    weights = peak_weights = 0
    peak = alive

    def drop(buffer: int) -> int:
        owners[buffer] -= 1
        return 0 if owners[buffer] else buffers[buffer]

    for operation in reversed(tape.operations):
        incoming = gradient.pop(operation.output, None)
        fresh: list[tuple[int, int]] = []
        if incoming is not None:
            for value in operation.inputs:
                if operation.passes_gradient:
                    owners[incoming] += 1
                    fresh.append((value, incoming))
                else:
                    buffers.append(tape.sizes[value])
                    owners.append(1)
                    fresh.append((value, len(buffers) - 1))
                    alive += tape.sizes[value]
            alive += operation.weight_gradient
            weights += operation.weight_gradient
            if alive + operation.backward_bytes > peak:
                peak, peak_weights = alive + operation.backward_bytes, weights
        for value in operation.saved:
            held[value] -= 1
            if not held[value]:
                alive -= sizes[value]
        alive -= operation.saved_bytes
        if incoming is None:
            continue
        alive -= drop(incoming)
        for value, buffer in fresh:
            if value not in gradient:
                gradient[value] = buffer
                continue
            old = gradient[value]
            if owners[old] == 1 or owners[buffer] == 1:
                kept, gone = (old, buffer) if owners[old] == 1 else (buffer, old)
                gradient[value] = kept
                alive -= drop(gone)
                continue
            buffers.append(tape.sizes[value])
            owners.append(1)
            alive += tape.sizes[value]
            gradient[value] = len(buffers) - 1
            if alive > peak:
                peak, peak_weights = alive, weights
            alive -= drop(old) + drop(buffer)
    return peak, peak_weights
