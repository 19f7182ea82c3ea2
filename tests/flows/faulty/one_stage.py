"""A flow of one training stage on given inputs: ``one_stage.py FOLDER STORE key=value ...``."""

import sys
from pathlib import Path

from configs import Config
from flows import command
from flows.steps import Artifact, Runner, Step
from stages.sft import SFT


class OneStage(Config):
    """What a run of the one stage needs."""

    name: str = "one"
    folder: Path
    store: Path
    runs: Path
    sft: Step[SFT]


def one_stage(config: OneStage, run: Runner) -> list[Artifact]:
    def given(name: str, path: Path) -> Artifact:
        return Artifact(name, name, path, "0" * 16, "reused")

    model, data = given("model", config.folder / "tied"), given("data", config.folder / "data")
    return [run("sft", config.sft, label="sft", model=model, data=data)]


if __name__ == "__main__":
    recipe = Path(sys.argv[1])
    sys.exit(
        command.main(
            "one-stage",
            OneStage,
            one_stage,
            description=None,
            argv=[str(recipe), "--engine", "inline", *sys.argv[2:]],
        )
    )
