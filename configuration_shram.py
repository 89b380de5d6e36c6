"""Configuration of the SHRAM language model. Imports no torch."""

import difflib
import inspect
import math
from numbers import Real

import transformers
from transformers import PretrainedConfig

OLDEST_TRANSFORMERS = (4, 57)
if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST_TRANSFORMERS:
    raise ImportError(f"SHRAM needs transformers >= 4.57.6, found {transformers.__version__}")

# Largest value of every size: far above any real model, low enough to stop a typing error before it allocates.
LARGEST_SIZE = {
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_hidden_layers": 2**12,
    "num_sliding_window_heads": 2**14,
    "window_size": 2**24,
    "num_mosrah_heads": 2**16,
    "num_selected_heads": 2**16,
    "head_dim": 2**12,
    "training_sequence_length": 2**30,
    "inference_sequence_length": 2**30,
}
# field: (test, rule in words); every value is known to be a finite number when its test runs.
NUMBER_RULES = {
    "local_rope_theta": (lambda x: 1 <= x <= 1e12, "in [1, 1e12]"),
    "mosrah_rope_theta": (lambda x: 1 <= x <= 1e12, "in [1, 1e12]"),
    "yarn_alpha": (lambda x: 0 <= x <= 1e12, "in [0, 1e12]"),
    "yarn_beta": (lambda x: 0 <= x <= 1e12, "in [0, 1e12]"),
    "mosrah_overallocation_factor": (lambda x: 1 <= x <= 1e6, "in [1, 1e6]"),
    "load_balance_coef": (lambda x: 0 <= x <= 1e6, "in [0, 1e6]"),
    "attention_dropout": (lambda x: 0 <= x < 1, "in [0, 1)"),
    "rms_norm_eps": (lambda x: 0 < x <= 1, "in (0, 1]"),
    "initializer_range": (lambda x: 0 <= x <= 10, "in [0, 10]"),
}
ROPE_MODES = ("main_sequence", "semantic_sequence")
TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
# What a saved folder tells the auto classes to load.
AUTO_MAP = {
    "AutoConfig": "configuration_shram.ShramConfig",
    "AutoModel": "modeling_shram.ShramModel",
    "AutoModelForCausalLM": "modeling_shram.ShramForCausalLM",
    "AutoModelForSequenceClassification": "modeling_shram.ShramForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_shram.ShramForTokenClassification",
}


def is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


class ShramConfig(PretrainedConfig):
    """Describe a SHRAM model: a Llama-like decoder whose attention adds a sliding window and routed heads (MoSRAH).

    Args:
        num_sliding_window_heads, window_size: heads of the local path, and the keys a query sees (its own too).
        num_mosrah_heads, num_selected_heads: routed heads L, and how many of them each token picks (K).
        rope_mode: positions of the routed path: the token's own (`main_sequence`), or its index among the tokens of
            the head (`semantic_sequence`).
        training_sequence_length, inference_sequence_length: their ratio is YaRN's scale (routed path only, arXiv
            2309.00071); the second is also the longest sequence a cache serves and defaults to the first.
        yarn_alpha, yarn_beta: a frequency that turns less often than alpha within the training length is stretched
            fully, one that turns more often than beta not at all.
        mosrah_overallocation_factor: slots of a fixed cache per head, in multiples of the balanced load.
        load_balance_coef: weight of `load_balance_loss` in the training loss.

    Raises:
        ValueError: with field, rule and value of every broken rule, or for an unknown keyword close to a field's name.
    """

    model_type = "shram"
    attribute_map = {
        "num_attention_heads": "num_sliding_window_heads",
        "num_key_value_heads": "num_sliding_window_heads",
        "max_position_embeddings": "inference_sequence_length",
        "num_experts": "num_mosrah_heads",
        "num_experts_per_tok": "num_selected_heads",
    }
    keys_to_ignore_at_inference = [
        "past_key_values",
        "cache",
        "load_balance_loss",
        "max_vio",
        "router_logits",
        "routed_attentions",
    ]

    def __init__(
        self,
        vocab_size=50277,
        hidden_size=512,
        intermediate_size=1366,
        num_hidden_layers=12,
        num_sliding_window_heads=16,
        window_size=128,
        num_mosrah_heads=64,
        num_selected_heads=16,
        head_dim=16,
        rope_mode="main_sequence",
        local_rope_theta=10000.0,
        mosrah_rope_theta=10000.0,
        training_sequence_length=1024,
        inference_sequence_length=None,
        yarn_alpha=1.0,
        yarn_beta=32.0,
        mosrah_overallocation_factor=2.0,
        load_balance_coef=0.01,
        attention_dropout=0.0,
        rms_norm_eps=1e-5,
        initializer_range=0.02,
        use_cache=True,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_sliding_window_heads = num_sliding_window_heads
        self.window_size = window_size
        self.num_mosrah_heads = num_mosrah_heads
        self.num_selected_heads = num_selected_heads
        self.head_dim = head_dim
        self.rope_mode = rope_mode
        self.local_rope_theta = local_rope_theta
        self.mosrah_rope_theta = mosrah_rope_theta
        self.training_sequence_length = training_sequence_length
        self.inference_sequence_length: int = inference_sequence_length  # pyrefly: ignore[bad-assignment]
        self.yarn_alpha = yarn_alpha
        self.yarn_beta = yarn_beta
        self.mosrah_overallocation_factor = mosrah_overallocation_factor
        self.load_balance_coef = load_balance_coef
        self.attention_dropout = attention_dropout
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.tie_word_embeddings = tie_word_embeddings
        self.pad_token_id = pad_token_id
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.take_aliases(kwargs)
        self.refuse_misspelt(kwargs)
        self.check_rules()
        kwargs.setdefault("auto_map", dict(AUTO_MAP))
        # the base owned these up to 4.57
        owned = {name: getattr(self, name) for name in ("tie_word_embeddings", *TOKEN_IDS)}
        super().__init__(**owned, **kwargs)

    @property
    def yarn_scale(self) -> float:
        """How far YaRN stretches the routed path's positions; 1 is plain rotary embedding."""
        return self.inference_sequence_length / self.training_sequence_length

    @property
    def mosrah_cache_length(self) -> int:
        """Slots of one routed head in a fixed cache."""
        balanced = self.inference_sequence_length * self.num_selected_heads / self.num_mosrah_heads
        return min(self.inference_sequence_length, math.ceil(balanced * self.mosrah_overallocation_factor))

    def set_inference_context(self, length: int) -> None:
        """Set the sequence length that YaRN stretches to and that caches serve."""
        before, self.inference_sequence_length = self.inference_sequence_length, length
        try:
            self.check_rules()
        except ValueError:
            self.inference_sequence_length = before
            raise

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As the base class, which sets overriding keywords past the constructor: check these too."""
        loaded = super().from_dict(config_dict, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        config.refuse_misspelt(name for name in kwargs if name not in config_dict and not hasattr(config, name))
        config.check_rules()
        return loaded

    def take_aliases(self, keywords: dict) -> None:
        """Move values given under standard names to their fields; None means not given.

        Raises:
            ValueError: two names of one field disagree.
        """
        given: dict[str, str] = {}
        parameters = inspect.signature(ShramConfig.__init__).parameters
        for alias, field in self.attribute_map.items():
            value = keywords.pop(alias, None)
            if value is None:
                continue
            other, held = given.get(field, field), getattr(self, field)
            if held != value and (field in given or held != parameters[field].default):
                raise ValueError(f"{alias} ({value!r}) and {other} ({held!r}) name one field and disagree")
            given[field] = alias
            setattr(self, field, value)
        if self.inference_sequence_length is None:
            self.inference_sequence_length = self.training_sequence_length

    def refuse_misspelt(self, keywords) -> None:
        """Raise for unknown keywords that look like a field: the library would keep them without a word."""
        fields = [*vars(self), *self.attribute_map]
        for name in keywords:
            near = difflib.get_close_matches(name, fields, n=1, cutoff=0.85)
            if near and name not in fields and not hasattr(PretrainedConfig, name):
                raise ValueError(f"{name} is not a field of ShramConfig; did you mean {near[0]}?")

    def check_rules(self) -> None:
        """Raise one ValueError that lists every broken rule with its field and value."""
        broken = [*self._broken_sizes(), *self._broken_numbers(), *self._broken_token_ids()]
        for name in ("use_cache", "tie_word_embeddings"):
            if not isinstance(getattr(self, name), bool):
                broken.append(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.rope_mode not in ROPE_MODES:
            broken.append(f"rope_mode must be one of {ROPE_MODES}, got {self.rope_mode!r}")
        if broken:
            raise ValueError("Invalid ShramConfig: " + "; ".join(broken))

    def _broken_sizes(self) -> list[str]:
        broken = [
            f"{name} must be an integer in [1, {largest}], got {getattr(self, name)!r}"
            for name, largest in LARGEST_SIZE.items()
            if not is_int(getattr(self, name)) or not 1 <= getattr(self, name) <= largest
        ]
        if is_int(self.head_dim) and self.head_dim % 2:
            broken.append(f"head_dim must be even (rotary pairs), got {self.head_dim}")
        num_heads = self.num_selected_heads, self.num_mosrah_heads
        if all(map(is_int, num_heads)) and num_heads[0] > num_heads[1]:
            limit = f"num_mosrah_heads ({self.num_mosrah_heads})"
            broken.append(f"num_selected_heads must be at most {limit}, got {self.num_selected_heads}")
        return broken

    def _broken_numbers(self) -> list[str]:
        broken = [
            f"{name} must be a number {rule}, got {getattr(self, name)!r}"
            for name, (holds, rule) in NUMBER_RULES.items()
            if not is_number(getattr(self, name)) or not holds(getattr(self, name))
        ]
        if is_number(self.yarn_alpha) and is_number(self.yarn_beta) and self.yarn_alpha >= self.yarn_beta:
            broken.append(f"yarn_alpha must be below yarn_beta ({self.yarn_beta}), got {self.yarn_alpha}")
        return broken

    def _broken_token_ids(self) -> list[str]:
        broken = []
        for name in TOKEN_IDS:
            value = getattr(self, name)
            ids = value if name == "eos_token_id" and isinstance(value, (list, tuple)) else [value]
            in_range = all(is_int(i) and (not is_int(self.vocab_size) or 0 <= i < self.vocab_size) for i in ids)
            if value is not None and not (ids and in_range):
                broken.append(f"{name} must be null or lie in [0, vocab_size), got {value!r}")
        return broken


ShramConfig.register_for_auto_class()

__all__ = ["ShramConfig"]
