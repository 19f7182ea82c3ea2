"""What a report says of exported models: what each was made of, and how true it is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.markdown import cell, table
from flows.plan_page import size
from flows.reward_report import measures


def exports(outputs: Mapping[str, Path]) -> list[str]:
    """A section on the outputs of ``convert``, by the label of the stage."""
    found = {label: measures(output) for label, output in outputs.items()}
    if not found:
        return []
    about = (
        "Each model lies in the `model` folder of its output and loads with `from_pretrained`. Its "
        "log-probabilities were compared with those of the model as training left it: the error is "
        "in units of their standard deviation, with the largest that is let pass, and of what "
        "training changed the export has to show most."
    )
    head = ["", "made of", "parameters", "type", "size", "error", "change that is kept, %"]
    return ["## Exports", about, table(head, [_row(label, each) for label, each in found.items()])]


def _row(label: str, found: Mapping[str, Any]) -> list[str]:
    merged = f", merged into {found['merged_into']} weights" if "merged_into" in found else ""
    parity = found.get("parity", {})
    error = "{logit_error:.2g} (at most {tolerance:g})".format(**parity) if parity else ""
    kept = f"{100 * parity['change_kept']:.1f}" if "change_kept" in parity else ""
    made_of = cell(f"{found['layout']}{merged}")
    types = ", ".join(found["dtypes"])
    return [label, made_of, f"{found['parameters']:,}", types, size(found["bytes"]), error, kept]
