"""Every stage, by name. A new stage is one module here and one line below."""

from stages.base import Stage
from stages.dpo import dpo
from stages.sft import sft

STAGES = {stage.name: stage for stage in (Stage(sft), Stage(dpo))}
