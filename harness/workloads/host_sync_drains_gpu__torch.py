# harness: rule host-sync-drains-gpu
# harness: needs torch
# harness: call-stacks
# harness: expect after each `.item()` the GPU idles until the next launch
"""Reads its loss with `.item()` each iteration (bad) or every 50th and the last.

An iteration moves the columns of a matrix by one, as a product with a permutation
matrix, and adds up the first column: whole numbers, so the result is exact. The warm-up
has ten iterations, to keep the trace small.
"""

import argparse
import sys
import time

import torch  # type: ignore[import-not-found, unused-ignore]


def arguments() -> argparse.Namespace:
    """Options as those of the CUDA workloads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", choices=("bad", "fixed"), required=True)
    parser.add_argument("--size", type=int, default=2560, help="side of the matrix")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=7)
    return parser.parse_args()


def main() -> int:
    """Run one warm-up and the repeats; exit code 1 if a number is wrong."""
    options = arguments()
    every = 1 if options.variant == "bad" else 50
    torch.backends.cuda.matmul.allow_tf32 = False
    size, device = options.size, torch.device("cuda")
    ones = torch.eye(size, device=device)
    shift = torch.roll(ones, 1, dims=1)
    start_values = (
        torch.arange(size, device=device).remainder(7).float().repeat(size, 1)
    )
    # The first column after k iterations is column -k of the beginning.
    sums = [float(size * (-k % size % 7)) for k in range(options.iterations + 1)]

    for run in range(options.repeat + 1):
        measured = run > 0
        x, other = start_values.clone(), torch.empty_like(start_values)
        count = options.iterations if measured else min(options.iterations, 10)
        losses = torch.zeros(count, device=device)
        read: dict[int, float] = {}
        torch.cuda.synchronize()
        if measured:
            torch.cuda.nvtx.range_push("region")
        start = time.perf_counter()
        for i in range(count):
            if measured:
                torch.cuda.nvtx.range_push(f"iteration {i}")
            torch.matmul(x, shift, out=other)
            x, other = other, x
            torch.sum(x[:, 0], dim=0, out=losses[i])
            if i % every == every - 1 or i == count - 1:
                read[i] = losses[i].item()
            if measured:
                torch.cuda.nvtx.range_pop()
        torch.cuda.synchronize()
        if measured:
            print(f"REGION_US {(time.perf_counter() - start) * 1e6:.2f}")
            torch.cuda.nvtx.range_pop()

        read.update(enumerate(losses.tolist()))
        for i, loss in read.items():
            if loss != sums[i + 1]:
                print(f"CHECK failed: loss {i} is {loss}, not {sums[i + 1]}")
                return 1
    print("CHECK ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
