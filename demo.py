"""Show what the shipped checkpoint does: `make demo`, or `python demo.py` beside the model files."""

import argparse
import time
from pathlib import Path

import matplotlib
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

HERE = Path(__file__).parent
STORY = "Once upon a time there was a poor woodcutter who had"
BATCH = ["The king said to his servants,", "In the evening the old woman opened the door and saw"]


def heading(text: str) -> None:
    print(f"\n--- {text}")


def show_generation(model, tokenizer, num_new: int) -> None:
    heading(f"greedy, streamed, {num_new} new tokens")
    prompt = tokenizer(STORY, return_tensors="pt")
    fixed = {"max_new_tokens": num_new, "do_sample": False}
    started = time.perf_counter()
    cached = model.generate(**prompt, **fixed, streamer=TextStreamer(tokenizer))
    seconds = time.perf_counter() - started
    num_made = cached.shape[1] - prompt["input_ids"].shape[1]
    print(f"[{num_made / seconds:.0f} tokens per second, {torch.get_num_threads()} threads]")

    started = time.perf_counter()
    uncached = model.generate(**prompt, **fixed, use_cache=False)
    seconds = time.perf_counter() - started
    same = torch.equal(cached, uncached)
    print(f"without cache: {num_made / seconds:.0f} tokens per second, the same text: {same}")
    if not same:
        raise SystemExit("cached and uncached generation differ")

    heading("beam search, 4 beams, the best 2")
    beams = model.generate(**prompt, max_new_tokens=num_new // 2, num_beams=4, num_return_sequences=2, do_sample=False)
    for text in tokenizer.batch_decode(beams, skip_special_tokens=True):
        print("*", text)

    heading("a left-padded batch of two prompts")
    batch = tokenizer(BATCH, return_tensors="pt", padding=True)
    together = model.generate(**batch, max_new_tokens=num_new // 2, do_sample=False)
    for text in tokenizer.batch_decode(together, skip_special_tokens=True):
        print("*", text)


def show_predictor(model, tokenizer, num_new: int) -> None:
    heading("drafted by the Predictor, checked by the model")
    predictor = model.load_predictor()
    prompt = tokenizer(BATCH[0], return_tensors="pt")
    fixed = {"max_new_tokens": num_new, "do_sample": False}
    plain = model.generate(**prompt, **fixed)
    drafted = model.generate(**prompt, **fixed, custom_generate=predictor.decode, predictor=predictor)
    num_made = drafted.shape[1] - prompt["input_ids"].shape[1]
    print(f"{num_made / predictor.num_full_passes:.2f} tokens per pass of the model; plain greedy's text:", end=" ")
    print(torch.equal(plain, drafted))


def show_cache(model, tokenizer) -> None:
    config = model.config
    ids = tokenizer(read_prompt(), return_tensors="pt").input_ids[:, : config.inference_sequence_length]
    cache = model.new_cache()
    with torch.no_grad():
        model(ids, cache=cache, logits_to_keep=1)
    # a dense layer keeps one key and one value for every token in each of its heads
    num_heads = config.num_sliding_window_heads + config.num_selected_heads
    dense = 2 * config.num_hidden_layers * ids.shape[1] * num_heads * config.head_dim * model.dtype.itemsize
    heading(f"cache after {ids.shape[1]} tokens")
    print(f"{cache.num_bytes():,} bytes; a dense cache of the same active width ({num_heads} heads): {dense:,}")


def read_prompt() -> str:
    """Prose for the pictures: the longest paragraph of the model card, repeated."""
    text = (HERE / "README.md").read_text(encoding="utf-8") if (HERE / "README.md").exists() else STORY
    return max(text.split("\n\n"), key=len) * 8


def show_heads(model, tokenizer, picture: Path) -> None:
    prompt = tokenizer(f"{STORY} two children. {BATCH[0]} and {BATCH[1]} them.", return_tensors="pt")
    with torch.no_grad():
        out = model(**prompt, output_router_logits=True, use_cache=False)
    config = model.config
    routers = [layer.self_attn.mosrah.router for layer in model.model.layers]
    chosen = torch.zeros(config.num_hidden_layers, prompt["input_ids"].shape[1], config.num_mosrah_heads)
    for layer, (router, logits) in enumerate(zip(routers, out.router_logits, strict=True)):
        heads = (logits[0] + router.expert_bias).topk(config.num_selected_heads).indices
        chosen[layer].scatter_(1, heads, 1.0)
    heading("how evenly the heads are used")
    share = chosen.mean(dim=1) * config.num_mosrah_heads / config.num_selected_heads
    for layer, row in enumerate(share):
        print(f"layer {layer}: load of each head, 1 is even: {' '.join(f'{x:.1f}' for x in row)}")
    print(f"max_vio {out.max_vio:.2f} (0 is even)")
    draw(chosen, tokenizer.convert_ids_to_tokens(prompt["input_ids"][0]), picture)
    print(f"\nwrote {picture}: which heads each token of the prompt chose")


def draw(chosen: torch.Tensor, tokens: list[str], picture: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    num_layers, num_tokens, _ = chosen.shape
    figure, axes = plt.subplots(
        num_layers, 1, figsize=(0.24 * num_tokens + 1.5, 1.7 * num_layers), sharex=True, layout="constrained"
    )
    for layer, axis in enumerate(axes):
        axis.imshow(chosen[layer].T, aspect="auto", cmap="Blues", interpolation="nearest", origin="lower")
        axis.set_ylabel(f"layer {layer}\nhead")
    axes[-1].set_xticks(range(num_tokens), [t.replace("Ġ", "·").replace("Ċ", "⏎") for t in tokens], rotation=90)
    figure.suptitle("Routed heads chosen by each token")
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--picture", type=Path, default=Path("demo_heads.png"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(HERE, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(HERE, trust_remote_code=True).eval()
    print(f"{model.num_parameters():,} parameters, {model.config.num_hidden_layers} layers")
    show_generation(model, tokenizer, arguments.new_tokens)
    show_predictor(model, tokenizer, arguments.new_tokens)
    show_cache(model, tokenizer)
    show_heads(model, tokenizer, arguments.picture)


if __name__ == "__main__":
    main()
