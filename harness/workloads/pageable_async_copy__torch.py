# harness: rule pageable-async-copy
# harness: needs torch
# harness: call-stacks
# harness: expect `.to(..., non_blocking=True)` of a pageable batch blocks the host
"""Trains a small CNN on batches in pageable (bad) or page-locked memory (fixed).

The batches are made, and in `fixed` pinned, before the measured region, as a data
loader with `pin_memory=True` would do on its own thread. Images travel as bytes. The
warm-up has three steps, to keep the trace small.
"""

import argparse
import sys
import time

import torch  # type: ignore[import-not-found, unused-ignore]
from torch import nn  # type: ignore[import-not-found, unused-ignore]

CHANNELS, SIDE = 3, 96
CLASSES = 10


def arguments() -> argparse.Namespace:
    """Options as those of the CUDA workloads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", choices=("bad", "fixed"), required=True)
    parser.add_argument("--size", type=int, default=512, help="images in a batch")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeat", type=int, default=7)
    return parser.parse_args()


def main() -> int:
    """Run one warm-up and the repeats; exit code 1 if a number is wrong."""
    options = arguments()
    torch.manual_seed(1)
    device = torch.device("cuda")
    network = nn.Sequential(
        *(nn.Conv2d(CHANNELS, 64, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES)),
    ).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.001)
    loss_of = nn.CrossEntropyLoss()

    shape = (options.size, CHANNELS, SIDE, SIDE)
    images = [torch.randint(0, 256, shape, dtype=torch.uint8) for _ in range(4)]
    labels = [torch.randint(0, CLASSES, (options.size,)) for _ in range(4)]
    if options.variant == "fixed":
        images = [batch.pin_memory() for batch in images]
        labels = [batch.pin_memory() for batch in labels]
    copied = torch.zeros((), dtype=torch.int64, device=device)
    loss = torch.zeros((), device=device)

    for run in range(options.repeat + 1):
        measured = run > 0
        copied.zero_()
        torch.cuda.synchronize()
        if measured:
            torch.cuda.nvtx.range_push("region")
        start = time.perf_counter()
        steps = options.steps if measured else min(options.steps, 3)
        for step in range(steps):
            if measured:
                torch.cuda.nvtx.range_push(f"iteration {step}")
            x = images[step % 4].to(device, non_blocking=True)
            y = labels[step % 4].to(device, non_blocking=True)
            copied += x.sum(dtype=torch.int64)
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(network(x.float() / 255 - 0.5), y)
            loss.backward()
            optimizer.step()
            if measured:
                torch.cuda.nvtx.range_pop()
        torch.cuda.synchronize()
        if measured:
            print(f"REGION_US {(time.perf_counter() - start) * 1e6:.2f}")
            torch.cuda.nvtx.range_pop()

    expected = sum(
        int(images[step % 4].sum(dtype=torch.int64)) for step in range(options.steps)
    )
    if int(copied) != expected:
        print(f"CHECK failed: the copied bytes add up to {int(copied)}, not {expected}")
        return 1
    if not 0 < float(loss.detach()) < 100:
        print(f"CHECK failed: the loss is {float(loss.detach())}")
        return 1
    print("CHECK ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
