"""The library's Trainer with learning rates by parameter name and evaluation in bits per byte."""

import json
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from shram.modeling_shram import ShramForCausalLM
from training import measure


class HeldOutTrainer(Trainer):
    """Args beyond Trainer's own.

    windows: source -> held-out token windows.
    byte_lengths: (V,) bytes per token id.
    rate_scales: part of a parameter's name -> factor on its learning rate.
    """

    model: ShramForCausalLM

    def __init__(self, *, windows: dict[str, list[Tensor]], byte_lengths: Tensor, rate_scales: dict, **kwargs):
        self.windows, self.byte_lengths, self.rate_scales = windows, byte_lengths, rate_scales
        super().__init__(eval_dataset=windows, **kwargs)

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = optimizer_class(self.parameter_groups(), **options)
        return self.optimizer

    def parameter_groups(self) -> list[dict]:
        """Group parameters by learning rate and weight decay."""
        named = dict(self.model.named_parameters())
        unused = [part for part in self.rate_scales if not any(part in name for name in named)]
        if unused:
            raise ValueError(f"learning_rate_scales: no parameter is named like {', '.join(unused)}")
        decayed = set(self.get_decay_parameter_names(self.model))
        groups = defaultdict(list)
        for name, parameter in named.items():
            scale = next((scale for part, scale in self.rate_scales.items() if part in name), 1.0)
            decay = self.args.weight_decay if name in decayed else 0.0
            groups[scale * self.args.learning_rate, decay].append(parameter)
        return [{"params": found, "lr": rate, "weight_decay": decay} for (rate, decay), found in groups.items()]

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        metrics = {}
        for source, windows in self.windows.items():
            for name, value in measure.measure(self.model, windows, self.byte_lengths).items():
                metrics[f"{metric_key_prefix}_{source}_{name}"] = value
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class JsonLines(TrainerCallback):
    """Append everything the trainer logs to a file, an object a line; a resumed run drops what it will log again."""

    def __init__(self, path: Path):
        self.path = path

    def on_train_begin(self, args, state, control, **kwargs):
        lines = self.path.read_text("utf-8").splitlines(keepends=True) if self.path.exists() else []
        kept = [line for line in lines if 0 < json.loads(line)["step"] <= state.global_step]
        self.path.write_text("".join(kept), encoding="utf-8")

    def on_log(self, args, state, control, logs=None, **kwargs):
        with self.path.open("a", encoding="utf-8") as file:
            print(json.dumps({"step": state.global_step, **(logs or {})}), file=file)
