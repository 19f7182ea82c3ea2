"""What a training left, made into one plain model folder: ``python -m flows.convert``."""

from flows.given import CheckpointSource, ModelSource, Named
from flows.steps import Artifact, Runner, Step
from stages.convert import Convert


class Conversion(Named):
    """Everything the flow needs, as it appears in YAML and in the Prefect UI."""

    trained: CheckpointSource
    """What is converted: ``local_checkpoint`` takes an adapter or shards of any kind."""

    base: ModelSource
    """The model that it was trained from: an adapter is merged into its weights, and it has the
    tokenizer and the chat template where training left none."""

    convert: Step[Convert] = Step[Convert](config=Convert())


def convert(config: Conversion, run: Runner) -> list[Artifact]:
    """The last output's ``model`` is the plain folder, validated and compared with ``trained``."""
    trained = run("fetch", config.trained, label="fetch trained")
    base = run("fetch", config.base, label="fetch base")
    model = run("convert", config.convert, label="convert", trained=trained, base=base)
    return [trained, base, model]


if __name__ == "__main__":
    from flows import command
    from flows.convert import Conversion, convert  # the importable twin of this module

    command.leave(
        command.main("convert", Conversion, convert, description=__doc__, default="tiny_convert")
    )
