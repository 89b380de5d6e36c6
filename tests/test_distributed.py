"""Two processes whose tokens choose different heads train like one process on both halves of the batch."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.support import tiny_config, wide_model

STEPS, ROWS = 3, 2


def split_model():
    """A model that sends tokens below 32 to heads 0 and 1, the others to heads 2 and 3."""
    model = wide_model(tiny_config(num_hidden_layers=1)).double().train()
    sign = torch.where(torch.arange(64) < 32, 1.0, -1.0).double()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 5 * sign
        model.model.layers[0].input_layernorm.weight[0] = 1
        model.model.layers[0].self_attn.mosrah.router.weight[:, 0] = torch.tensor([10.0, 10.0, -10.0, -10.0]).double()
    return model


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(32 * rank, 32 * rank + 32, (ROWS, 13), generator=generator)


def train(model, batches, parameters):
    """Gradients of each step of plain gradient descent."""
    recorded = []
    for ids in batches:
        model(input_ids=ids, labels=ids).loss.backward()
        recorded.append({name: parameter.grad.clone() for name, parameter in parameters})
        with torch.no_grad():
            for _, parameter in parameters:
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
    return recorded


def work(rank: int, folder: str):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = split_model()
    wrapped = DistributedDataParallel(model, find_unused_parameters=False)
    recorded = train(wrapped, [batch(rank, step) for step in range(STEPS)], list(model.named_parameters()))
    torch.save(recorded, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    torch.multiprocessing.spawn(work, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_the_halves_choose_disjoint_heads():
    model = split_model().eval()
    for rank, expected in enumerate(([26, 26, 0, 0], [0, 0, 26, 26])):
        cache = model.new_cache()
        model(batch(rank, 0), cache=cache, use_cache=True)
        assert cache.layers[0].mosrah_cache.get_heads_lengths().sum(dim=0).tolist() == expected


def test_two_processes_equal_one_on_the_joined_batch(recorded):
    model = split_model()
    joined = [torch.cat([batch(rank, step) for rank in range(2)]) for step in range(STEPS)]
    expected = train(model, joined, list(model.named_parameters()))
    for step, gradients in enumerate(expected):
        for name, gradient in gradients.items():
            torch.testing.assert_close(recorded[0][step][name], recorded[1][step][name], rtol=0, atol=0, msg=name)
            # the bias is pulled by the loads of each process alone
            if not name.endswith("expert_bias"):
                torch.testing.assert_close(recorded[0][step][name], gradient, rtol=1e-6, atol=1e-6, msg=name)
