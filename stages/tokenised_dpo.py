"""TRL's DPO trainer on rows that the data stage has tokenised. Imported only inside a rank."""

from collections.abc import Mapping
from typing import Any

import torch
from trl import DPOTrainer


class TokenisedDPOTrainer(DPOTrainer):
    """Takes ``prompt_ids``, ``chosen_ids`` and ``rejected_ids`` as they are.

    TRL 1.16 tokenises every data set again, inside the process group, and has no argument against
    it; its SFT trainer has. Ends when DPOTrainer accepts tokenised rows.

    Its loss ``sft`` is the mean over the tokens of a micro-batch, which would depend on how the
    step is split. Weighed by the tokens of each, it is the mean over all tokens of the step. Ends
    when that loss is told how many these are, as SFT's is.
    """

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of one optimizer step."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        if "sft" in self.loss_types:
            mean = torch.stack([_chosen_tokens(batch) for batch in batches]).float().mean()
            self.mean_chosen_tokens: Any = self.accelerator.reduce(mean, "mean")
        return batches, num_items

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if "sft" in self.loss_types:
            share = _chosen_tokens(inputs) / self.mean_chosen_tokens
            self.loss_weights = [1.0, self.args.loss_weights[1] * share]
        return super().compute_loss(model, inputs, *args, **kwargs)


def _chosen_tokens(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """How many tokens TRL takes that mean over; chosen rows come before rejected ones."""
    return batch["completion_mask"][:, 1:].chunk(2)[0].sum()
