"""TRL's DPO trainer on rows that the data stage has tokenised. Imported only inside a rank."""

from typing import Any

from trl import DPOTrainer


class TokenisedDPOTrainer(DPOTrainer):
    """Takes ``prompt_ids``, ``chosen_ids`` and ``rejected_ids`` as they are.

    TRL 1.16 tokenises every data set again, inside the process group, and has no argument against
    it; its SFT trainer has. Ends when DPOTrainer accepts tokenised rows.
    """

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset
