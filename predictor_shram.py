"""A two-block Predictor that drafts tokens for a SHRAM model, and greedy decoding that uses it.

The Predictor's blocks are copies of two layers of the teacher, trained to read those layers' committed K/V through a
`PredictorWorkspace`. It drafts a whole chunk at once (P1) and may refine it (P2, P3); one Full pass of the teacher
checks the chunk and commits what it agrees with, each row of a batch its own number of tokens. Only the teacher's
choices are ever returned.

Shapes: B rows, C drafted tokens, T = C + 1 tokens of a Full pass, D hidden, V vocabulary.
"""

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import load_state_dict
from transformers.utils import cached_file

from .attention_shram import TokenRows
from .rollout_shram import PredictorWorkspace

FOLDER = "predictor"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
MASK = -1  # stands for a token that is yet to be guessed
# A Full pass over more tokens costs more than its drafts save: a batch waits for its unluckiest row anyway.
FULL_PASS_TOKENS = 16


class ShramPredictor(nn.Module):
    """Two blocks beside a teacher, whose embedding, head and committed K/V they use.

    Args:
        teacher: a `ShramForCausalLM`; it is not changed and not part of the Predictor's state_dict.
        source_layers: the teacher's layers that the blocks are copies of and whose history they read.
        num_drafts: C, tokens guessed at once.
        num_steps: P-steps it is trained for.
        reads_history: False hides the committed K/V from it, to see what they are worth.
    """

    num_full_passes = 0  # of the last decoding

    def __init__(
        self, teacher, *, source_layers=(1, 4), num_drafts: int = 7, num_steps: int = 3, reads_history: bool = True
    ):
        super().__init__()
        num_layers, hidden = teacher.config.num_hidden_layers, teacher.config.hidden_size
        if not source_layers or not all(0 <= i < num_layers for i in source_layers):
            raise ValueError(f"source_layers must name layers in [0, {num_layers}), got {tuple(source_layers)}")
        if num_drafts < 1 or num_steps < 1:
            raise ValueError(f"num_drafts and num_steps must be >= 1, got {num_drafts} and {num_steps}")
        self.source_layers, self.num_drafts, self.num_steps = tuple(source_layers), num_drafts, num_steps
        self.reads_history = reads_history
        self.teacher = (teacher,)  # in a tuple, so that its parameters are not the Predictor's
        layers = teacher.model.layers
        self.layers = nn.ModuleList(copy.deepcopy(layers[i]) for i in self.source_layers)
        self.norm = copy.deepcopy(teacher.model.norm)
        like = {"dtype": teacher.dtype, "device": teacher.device}
        self.fusion = nn.Linear(2 * hidden, hidden, bias=False, **like)
        self.mask_embedding = nn.Parameter(torch.zeros(hidden, **like))
        self.offset_embedding = nn.Parameter(torch.zeros(num_drafts, hidden, **like))
        self.step_embedding = nn.Parameter(torch.zeros(num_steps, hidden, **like))
        with torch.no_grad():  # at first the token's embedding alone
            self.fusion.weight.copy_(torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1))

    @property
    def settings(self) -> dict:
        names = ("source_layers", "num_drafts", "num_steps", "reads_history")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def load(cls, teacher, path=None, subfolder: str = FOLDER) -> "ShramPredictor":
        """The Predictor beside a checkpoint: a folder or a Hub id; None: where the teacher came from."""
        path = teacher.name_or_path if path is None else str(path)
        settings, weights = (str(cached_file(path, name, subfolder=subfolder)) for name in (CONFIG_FILE, WEIGHTS_FILE))
        predictor = cls(teacher, **json.loads(Path(settings).read_text(encoding="utf-8")))
        predictor.load_state_dict(load_state_dict(weights))
        return predictor.eval()

    def open(self, cache, num_drafts: int | None = None) -> PredictorWorkspace:
        """A workspace over the teacher's cache for one chunk."""
        return PredictorWorkspace(
            cache,
            source_layers=self.source_layers,
            current_tokens=self.num_drafts if num_drafts is None else num_drafts,
            history_tokens=None if self.reads_history else 0,
        )

    def forward(self, chunk: Tensor, feature: Tensor, workspace, step: int = 0) -> tuple[Tensor, Tensor]:
        """One P-step: logits (B, C, V) of the tokens after each of the chunk's, and features (B, C, D) for the next.

        Args:
            chunk: (B, C) ids, first the newest token, then guesses or MASK.
            feature: (B, C, D): at step 0 the teacher's last hidden state, later what the step before returned.
        """
        teacher, num_tokens = self.teacher[0], chunk.shape[1]
        embedded = teacher.model.embed_tokens(chunk.clamp(min=0))
        embedded = torch.where((chunk == MASK)[..., None], self.mask_embedding, embedded)
        x = self.fusion(torch.cat([embedded, feature], dim=-1))
        x = x + self.offset_embedding[:num_tokens] + self.step_embedding[min(step, self.num_steps - 1)]
        rows = self.token_rows(chunk, workspace).with_rotary(teacher.config, x.dtype)
        for i, layer in zip(self.source_layers, self.layers, strict=True):
            x = layer(x, tokens=rows, layer_cache=workspace[i])[0]
        x = self.norm(x)
        return teacher.lm_head(x), x

    def token_rows(self, chunk: Tensor, workspace) -> TokenRows:
        window = workspace[self.source_layers[0]].sliding_window_cache
        step = torch.arange(chunk.shape[1], device=chunk.device)
        past = window.num_real_tokens.to(chunk.device)
        past = past if len(past) else past.new_zeros(len(chunk))  # a workspace opened before the first write
        num_past = window.get_seq_length()
        index = (num_past + step).expand(len(chunk), -1)
        return TokenRows(None, past[:, None] + step, index, num_past + chunk.shape[1])

    def roll_out(self, anchor: Tensor, feature: Tensor, workspace, num_steps: int):
        """Yield the logits (B, C, V) of P1, P2, ...; each step sees the guesses and features before it, detached.

        anchor: (B,) the newest token, not yet in the cache. feature: (B, D) teacher's hidden state that chose it.
        """
        num_drafts = workspace.current_tokens
        chunk = anchor.new_full((len(anchor), num_drafts), MASK)
        chunk[:, 0] = anchor
        feature = feature[:, None].expand(-1, num_drafts, -1)
        for step in workspace.steps(num_steps):
            logits, feature = self(chunk, feature, workspace, step)
            yield logits
            feature = feature.detach()
            chunk = torch.cat([anchor[:, None], logits.detach()[:, :-1].argmax(dim=-1)], dim=1)

    def draft(self, anchor: Tensor, feature: Tensor, cache, num_drafts: int, num_steps: int) -> Tensor:
        """Guess the num_drafts tokens (B, C) that follow `anchor`; the cache is read only."""
        with self.open(cache, num_drafts) as workspace:
            return list(self.roll_out(anchor, feature, workspace, num_steps))[-1].argmax(dim=-1)


# ---------------------------------------------------------------------------------------------------- decoding


class Rows:
    """The sequences being written, each at its own length, and the caller's processors and criteria for them."""

    def __init__(self, input_ids: Tensor, logits_processor, stopping_criteria, generation_config):
        self.num_rows, self.prompt_tokens = input_ids.shape
        self.processor: Any = logits_processor
        self.criteria: Any = stopping_criteria
        self.max_length = generation_config.max_length
        self.ids = input_ids.new_zeros(self.num_rows, max(self.max_length, self.prompt_tokens + 1))
        self.ids[:, : self.prompt_tokens] = input_ids
        self.lengths = [self.prompt_tokens] * self.num_rows
        self.ends: list[int | None] = [None] * self.num_rows  # lengths at which the criteria were met
        pad = generation_config.pad_token_id
        # as in plain greedy: with an eos criterion done rows are padded, without one they go on until all are done
        self.pad = pad if any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria) else None

    def seen(self, row: int, length: int) -> Tensor:
        """The row's ids so far, once for every row, since processors and criteria may know the batch."""
        return self.ids[row, :length].expand(self.num_rows, -1)

    def choose(self, row: int, logits: Tensor, drafts: Tensor) -> list[int]:
        """Greedy choices of one row along its draft, up to the first that differs: logits (T, V), drafts (C,)."""
        chosen, length, guesses = [], self.lengths[row], drafts.tolist()
        for j, scores in enumerate(logits[: self.ids.shape[1] - length]):
            processed = self.processor(self.seen(row, length + j), scores.repeat(self.num_rows, 1))
            chosen.append(int(processed[row].argmax()))
            self.ids[row, length + j] = chosen[-1]
            if j == len(guesses) or chosen[-1] != guesses[j]:
                break
        return chosen

    def append(self, row: int, tokens: list[int]) -> int:
        """Add tokens until the row is done; returns how many were added."""
        for num_added, token in enumerate(tokens, start=1):
            length = self.lengths[row]
            self.ids[row, length] = token
            self.lengths[row] = length + 1
            met = self.criteria(self.seen(row, length + 1), None)
            if self.ends[row] is None and (bool(met[row]) if torch.is_tensor(met) else bool(met)):
                self.ends[row] = length + 1
            if self.is_done(row):
                return num_added
        return len(tokens)

    def is_done(self, row: int) -> bool:
        if self.lengths[row] >= self.ids.shape[1]:
            return True
        if self.pad is not None:
            return self.ends[row] is not None
        return None not in self.ends and self.lengths[row] >= max(end or 0 for end in self.ends)

    def active(self) -> list[int]:
        return [row for row in range(self.num_rows) if not self.is_done(row)]

    def result(self) -> Tensor:
        """(B, longest): what plain greedy returns."""
        longest = max(end or length for end, length in zip(self.ends, self.lengths, strict=True))
        if self.pad is not None:
            for row, length in enumerate(self.lengths):
                self.ids[row, length:] = self.pad
        return self.ids[:, :longest]


class Call(NamedTuple):
    """What `generate` hands over, checked: a `ShramForCausalLM`, a `ShramPredictor`, its steps, a `ShramCache`."""

    model: Any
    predictor: Any
    num_steps: int
    cache: Any
    stream_to: Any


def check_call(model, input_ids, generation_config, predictor, predictor_steps, stream_to, kwargs) -> Call:
    """Refuse by name what this loop cannot do."""
    mode = generation_config.get_generation_mode()
    cache = kwargs.pop("cache", None)
    cache = kwargs.pop("past_key_values", None) if cache is None else cache
    if predictor is None or getattr(predictor, "draft", None) is None:
        raise ValueError("pass predictor=, such as model.load_predictor()")
    rules = {
        "do_sample, num_beams, prompt lookup and other modes: it decodes greedily": str(mode.value) == "greedy_search",
        "num_return_sequences > 1": generation_config.num_return_sequences in (None, 1),
        "return_dict_in_generate": not generation_config.return_dict_in_generate,
        "guidance_scale": generation_config.guidance_scale in (None, 1, 1.0),
        "prefill_chunk_size": generation_config.prefill_chunk_size is None,
        "use_cache=False": cache is not None,
        "inputs_embeds": kwargs.get("inputs_embeds") is None and input_ids.shape[1] > 0,
        "stream_to with more than one row": stream_to is None or len(input_ids) == 1,
        "a cache of the caller's with more than one row": len(input_ids) == 1
        or not cache
        or not cache.get_seq_length(),
        "padding behind a prompt": kwargs.get("attention_mask") is None or bool(kwargs["attention_mask"][:, -1].all()),
    }
    broken = [name for name, holds in rules.items() if not holds]
    if broken:
        raise ValueError(f"decode_with_predictor does not support {'; '.join(broken)}")
    if not isinstance(predictor_steps, int) or predictor_steps < 1:
        raise ValueError(f"predictor_steps must be an integer >= 1, got {predictor_steps!r}")
    return Call(model, predictor, predictor_steps, cache, stream_to)


def prefill(call: Call, input_ids: Tensor, attention_mask, position_ids) -> tuple[Tensor, Tensor]:
    """Feed what the cache has not seen; logits (B, V) and hidden state (B, D) of the last token."""
    past = call.cache.get_seq_length()
    if past >= input_ids.shape[1]:
        raise ValueError(f"the cache holds {past} tokens, input_ids must be longer than that, got {input_ids.shape[1]}")
    if position_ids is not None:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        num_given = min(position_ids.shape[-1], input_ids.shape[1] - past)
        counted = (mask.cumsum(dim=-1) - 1)[:, -num_given:]
        given, real = position_ids.expand(len(counted), -1)[:, -num_given:], mask[:, -num_given:].bool()
        if not torch.equal(given[real], counted[real].to(given.dtype)):
            raise ValueError("decode_with_predictor counts real tokens itself: other position_ids are not supported")
    out = call.model.model(
        input_ids=input_ids[:, past:], attention_mask=attention_mask, cache=call.cache, use_cache=True, return_dict=True
    )
    hidden = out.last_hidden_state[:, -1]
    return call.model.lm_head(hidden), hidden


@torch.no_grad()
def decode_with_predictor(
    model,
    input_ids: Tensor,
    logits_processor=None,
    stopping_criteria=None,
    generation_config=None,
    predictor=None,
    predictor_steps: int = 1,
    stream_to=None,
    **kwargs,
) -> Tensor:
    """Greedy decoding by drafts: `model.generate(ids, custom_generate=decode_with_predictor, predictor=p)`.

    Returns what plain greedy returns, exactly so in exact arithmetic. `generate` drops `streamer` for callables: pass
    `stream_to=` (one row). The number of Full passes is left in `predictor.num_full_passes`.

    Raises:
        ValueError: the call asks for something other than plain greedy decoding; named.
    """
    call = check_call(model, input_ids, generation_config, predictor, predictor_steps, stream_to, kwargs)
    rows = Rows(input_ids, logits_processor, stopping_criteria, generation_config)
    logits, feature = prefill(call, input_ids, kwargs.get("attention_mask"), kwargs.get("position_ids"))
    was_recording = all(layer.record_past for layer in call.cache.layers)
    call.cache.activate_past_recording()
    call.predictor.num_full_passes = 1
    active = list(range(rows.num_rows))
    verify(call, rows, active, logits[:, None], logits.new_zeros(len(active), 0, dtype=torch.int64))
    active, feature = drop_done(call, rows, active, feature)
    while active and rows.active():
        active, feature = full_pass(call, rows, active, feature)
    for layer in call.cache.layers:
        layer.record_past = was_recording
    if stream_to is not None:
        stream_to.end()
    return rows.result()


def full_pass(call: Call, rows: Rows, active: list[int], feature: Tensor) -> tuple[list[int], Tensor]:
    """Draft, verify and commit one chunk of the active rows; returns those still active and their hidden states."""
    anchor = torch.stack([rows.ids[row, rows.lengths[row] - 1] for row in active])
    room = rows.ids.shape[1] - min(rows.lengths[row] for row in active)
    # no row's places may outgrow what plain greedy would feed
    room = min(room, call.model.config.inference_sequence_length - call.cache.get_seq_length())
    num_drafts = min(call.predictor.num_drafts, room - 1, max(1, FULL_PASS_TOKENS // len(active) - 1))
    drafts = anchor.new_zeros(len(active), 0)
    if num_drafts > 0:
        drafts = call.predictor.draft(anchor, feature, call.cache, num_drafts, call.num_steps)
    chunk = torch.cat([anchor[:, None], drafts], dim=1)
    out = call.model.model(input_ids=chunk, cache=call.cache, use_cache=True, return_dict=True)
    call.predictor.num_full_passes += 1
    added = verify(call, rows, active, call.model.lm_head(out.last_hidden_state), drafts)
    num_added = torch.tensor(added, device=chunk.device)
    feature = out.last_hidden_state[torch.arange(len(active), device=chunk.device), num_added - 1]
    # committed are the anchor and all tokens added but the newest, which is the next anchor: as many as were added
    if rows.num_rows == 1:
        call.cache.commit(added[0])
        return active, feature
    active, feature, num_added = drop_done(call, rows, active, feature, num_added)
    call.cache.commit(num_added)
    return active, feature


def drop_done(call: Call, rows: Rows, active: list[int], *states: Tensor) -> tuple:
    """The rows still to be written, and theirs of the cache's rows and of `states`; all stay when none is left."""
    left = rows.active()
    if not left or left == active:
        return active, *states
    keep = torch.tensor([active.index(row) for row in left], device=states[0].device)
    call.cache.batch_select_indices(keep)
    return left, *(state[keep] for state in states)


def verify(call: Call, rows: Rows, active: list[int], logits: Tensor, drafts: Tensor) -> list[int]:
    """Append to each row the teacher's choices along its draft and one more; returns how many each row got."""
    logits = logits.to(torch.float32)  # as plain greedy compares them
    if rows.processor:
        agreed = [rows.choose(row, *of_row) for row, *of_row in zip(active, logits, drafts, strict=True)]
    else:
        choices = logits.argmax(dim=-1)
        accepted = (choices[:, :-1] == drafts).cumprod(dim=1).sum(dim=1)
        agreed = [row[: n + 1] for row, n in zip(choices.tolist(), accepted.tolist(), strict=True)]
    added = []
    for row, tokens in zip(active, agreed, strict=True):
        added.append(rows.append(row, tokens))
        if call.stream_to is not None:
            call.stream_to.put(torch.tensor(tokens[: added[-1]]))
    return added


ShramPredictor.decode = staticmethod(decode_with_predictor)

__all__ = ["ShramPredictor", "decode_with_predictor"]
