"""Evaluates FlashInfer's choice between one-shot and two-shot before and after the edit. Usage: oneshot.py BEFORE AFTER; both hold
`flashinfer/comm/trtllm_ar.py`.

Prints how many cases were evaluated. Ends with an error at the first case that is not as it must be.
"""

import ast
import itertools
import sys
from types import SimpleNamespace

from fakes import File, World

PATH = "flashinfer/comm/trtllm_ar.py"


def chosen(file, world, tokens, hidden, asked=None):
    """What the kernel is launched with; `asked` is the caller's own wish."""
    launched = []
    dtype = SimpleNamespace(itemsize=2)
    more = {
        "MAX_COMM_SIZE": 2147483647 & ~((1 << 21) - 1),
        "logging": SimpleNamespace(warning=lambda *a: None),
        "get_trtllm_comm_module": lambda: SimpleNamespace(trtllm_allreduce_fusion=lambda **given: launched.append(given["use_oneshot"])),
    }
    names = ["trtllm_allreduce_fusion"]
    if file.has("_should_use_oneshot"):
        names.append("_should_use_oneshot")
        more["_use_oneshot_heuristics"] = limits(file)
    (fused, *_), _ = file.functions(world, *names, more=more)
    arguments = {argument.arg: None for argument in file.node("trtllm_allreduce_fusion").args.args}
    arguments.update(
        allreduce_in=SimpleNamespace(dtype=dtype, device="cuda"),
        world_size=world.tp,
        world_rank=0,
        token_num=tokens,
        hidden_dim=hidden,
        use_oneshot=asked,
    )
    try:
        fused(**arguments)
    except AssertionError:
        return "error"
    return launched.pop()


def limits(file):
    """FlashInfer's table of limits."""
    for node in file.tree.body:
        target = getattr(node, "target", None) or (getattr(node, "targets", None) or [None])[0]
        if getattr(target, "id", None) == "_use_oneshot_heuristics":
            return ast.literal_eval(node.value)
    raise AssertionError("no table of limits")


def main():
    before, after = File(sys.argv[1], PATH), File(sys.argv[2], PATH)
    cases = differ = 0
    axes = [(90, 100, 120), (2, 4, 8), ("gone", "not in force", "in force"), (None, 1, 64), (None, True, False)]
    for sm, tp, state, limit, asked in itertools.product(*axes):
        made = dict(sm=sm, tp=tp, package=state != "gone", in_force=state == "in force", policy={2: {}, 4: {"oneshot_tokens": limit}})
        for tokens, hidden in itertools.product((1, 2, 4, 5, 64, 65, 128, 129, 2048), (2880, 7168)):
            was = chosen(before, World(**made), tokens, hidden, asked)
            now = chosen(after, World(**made), tokens, hidden, asked)
            ours = sm == 120 and state == "in force" and tp == 4 and limit is not None and asked is None and tokens > tp
            expected = tokens <= limit if ours else was
            assert now == expected, f"{now} where {expected} was expected: {made}, {tokens}, {hidden}, {asked}"
            cases += 1
            differ += now != was
    assert differ, "the policy decides nothing"
    print(cases)


if __name__ == "__main__":
    main()
