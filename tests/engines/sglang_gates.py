"""Evaluates SGLang's gates before and after the edits. Usage: sglang_gates.py BEFORE AFTER [--few] [--auto-enable]; both hold
`sglang/srt/…`.

Prints one JSON object: how many cases were evaluated by gate. Ends with an error at the first case that is not as it must be.
"""

import ast
import itertools
import json
import os
import sys
from collections import Counter
from types import SimpleNamespace

from fakes import File, Tensor, World, during

COMMUNICATOR = "sglang/srt/layers/communicator.py"
ADD_NORM = "sglang/srt/layers/layer_boundary/residual/add_norm.py"
NORM = "sglang/srt/layers/layernorm.py"
FUSION = "sglang/srt/layers/flashinfer_comm_fusion.py"
SERVER = "sglang/srt/server_args.py"
OVERRIDES = "sglang/srt/arg_groups/overrides.py"
LIMIT = 2048
# Only the combinations that differ most.
FEW = "--few" in sys.argv

cases = Counter()


def check(gate, found, expected, *about):
    cases[gate] += 1
    assert found == expected, f"{gate}: {found!r} where {expected!r} was expected: {about}"


class Tree:
    """SGLang's files, before or after the edits; a file that has none is the same in both."""

    def __init__(self, root, other=None):
        self.root, self.other, self.read = root, other, {}

    def has(self, path):
        return any(root and os.path.exists(os.path.join(root, path)) for root in (self.root, self.other))

    def file(self, path):
        if path not in self.read:
            here = os.path.exists(os.path.join(self.root, path))
            self.read[path] = File(self.root if here else self.other, path)
        return self.read[path]


def worlds():
    """Every combination that decides something, on each GPU."""
    axes = {
        "sm": [89, 90, 100, 120, 121],
        "flag": [True, False],
        "dp": [False, True],
        "groups": [(2, 1), (4, 1), (8, 1), (2, 2), (8, 2)],
        "state": ["gone", "not in force", "in force"],
        "policy": ["default", "named"],
    }
    if FEW:
        axes.update(sm=[90, 120], flag=[True], groups=[(2, 1), (4, 1), (8, 2)])
    for sm, flag, dp, (tp, ep), state, policy in itertools.product(*axes.values()):
        yield dict(
            sm=sm,
            flag=flag,
            dp=dp,
            tp=tp,
            ep=ep,
            package=state != "gone",
            in_force=state == "in force",
            policy={2: {}} if policy == "default" else {2: {"max_tokens": 64}, 8: {"max_tokens": 2000}},
            workspace_tokens=None if policy == "default" else 1024,
        )


def more_worlds():
    """Worlds that the fused call cannot serve, or whose tokens the workspace cannot hold."""
    yield dict(sm=120, fused_works=False)
    yield dict(sm=120, fused_works=False, tp=4, ep=4, policy={4: {}})
    for sm in (90, 120):
        yield dict(sm=sm, nnodes=2)
        yield dict(sm=sm, pp=2)
        yield dict(sm=sm, norm_can_fuse=False)
        yield dict(sm=sm, unavailable=True)
        yield dict(sm=sm, policy={2: {"max_tokens": 4096}}, workspace_tokens=128)
        yield dict(sm=sm, tp=4, attn_tp=2, policy={2: {}, 4: {}})


TOKENS = (1, 64, 65, 1024, 1025, 2000, 2001, 2048, 2049, 4096, 4097)


def admitted(world, tokens):
    """What the policy and the state say, in words of our own."""
    limits = world.policy.get(world.tp)
    return (
        world.sm // 10 == 12
        and world.package
        and world.in_force
        and limits is not None
        and tokens <= (limits.get("max_tokens") or LIMIT)
        and tokens <= (world.workspace_tokens or LIMIT)
    )


class Model:
    """The two halves of a layer, run through the functions of one tree."""

    def __init__(self, tree, world):
        self.tree, self.world = tree, world
        old = tree.has(COMMUNICATOR)
        self.file = tree.file(COMMUNICATOR if old else ADD_NORM)
        predicates = [name for name in ("apply_flashinfer_allreduce_fusion", "flashinfer_ar_fusion_applies") if self.file.has(name)]
        methods = ["LayerCommunicator.should_fuse_mlp_allreduce_with_next_layer", "LayerCommunicator.prepare_attn"]
        gather = "CommunicateWithAllReduceAndLayerNormFn._gather_hidden_states_and_residual"
        names = predicates + (methods + [gather] if old else [])
        functions, _ = self.file.functions(world, *names)
        named = dict(zip((name.rpartition(".")[2] for name in names), functions))
        self.predicate = named[predicates[0]] if predicates else None
        self.should_fuse = named.get("should_fuse_mlp_allreduce_with_next_layer")
        self.prepare = named.get("prepare_attn")
        self.gather = named.get("_gather_hidden_states_and_residual")
        self.norm = Norm(tree, world)
        world.one_group = not self.norm.shared
        # From 0.5.14 on, the choice of the backend refuses more than one node.
        self.asks_nodes = "nnodes > 1" in self.file.text

    def attention(self, tokens):
        """Runs the sum behind the attention; returns whether it was fused, and whether its numbers are right."""
        if self.gather is None:
            return self.predicate(tokens), True
        x = Tensor(tokens, range(1, self.world.tp + 1))
        residual = Tensor(tokens, [100] * self.world.tp)
        before = getattr(self.world, "fused_calls", 0)
        context = SimpleNamespace(attn_dp_size=1, attn_tp_size=self.world.attn_tp, attn_tp_rank=0, cache=None)
        y, after = self.gather(x, residual, batch(tokens), self.norm, context, residual_input_mode="full")
        expected = self.world.reduce(x, "attn" if not self.world.one_group else "tp").parts
        return getattr(self.world, "fused_calls", 0) > before, y.parts == after.parts == [p + 100 for p in expected]

    def experts(self, tokens):
        """Runs the sum behind the experts, and the next layer's norm; returns whether the sum was left to it, and whether its
        numbers are right."""
        me = SimpleNamespace(
            is_last_layer=False,
            _speculative_algo=None,
            _context=SimpleNamespace(tp_size=self.world.tp),
            input_layernorm=self.norm,
            layer_scatter_modes=SimpleNamespace(mlp_mode="full"),
            qkv_latent_func=None,
            _sp_variant=None,
            enable_fused_ar_quant=False,
            _communicate_simple_fn=lambda hidden_states, **_: hidden_states,
        )
        left = self.should_fuse(me, batch(tokens))
        x = Tensor(tokens, range(1, self.world.tp + 1))
        total = [sum(x.parts)] * self.world.tp
        if left:
            x._sglang_needs_allreduce_fusion = True
        else:
            x = Tensor(tokens, total)
        residual = Tensor(tokens, [100] * self.world.tp)
        y, after = self.prepare(me, x, residual, batch(tokens))
        return left, y.parts == after.parts == [part + 100 for part in total]


def batch(tokens):
    mode = SimpleNamespace(is_decode_or_idle=lambda: True)
    return SimpleNamespace(input_ids=Tensor(tokens, [0]), forward_mode=mode)


class Norm:
    """A norm of SGLang's, whose forward is the addition alone, in place as SGLang's is."""

    variance_epsilon = 1e-6
    weight = "weight"

    def __init__(self, tree, world):
        file = tree.file(NORM)
        self.shared = file.has("_forward_with_allreduce_fusion")
        name = "_forward_with_allreduce_fusion" if self.shared else "RMSNorm.forward_with_allreduce_fusion"
        (self.function,), _ = file.functions(world, name)
        if world.norm_can_fuse:
            self.forward_with_allreduce_fusion = self.fused

    def fused(self, x, residual, post_residual_addition=None, use_attn_tp_group=True):
        if self.shared:
            return self.function(self, x, residual, post_residual_addition, self.weight, use_attn_tp_group)
        extra = () if post_residual_addition is None else (post_residual_addition,)
        return self.function(self, x, residual, *extra)

    def forward(self, x, residual=None, post_residual_addition=None):
        for addend in (x, post_residual_addition):
            if addend is not None:
                residual.parts = [a + b for a, b in zip(residual.parts, addend.parts)]
        return residual.clone(), residual

    __call__ = forward


def predicate(before, after):
    """Both halves, on every GPU, with every state of our package."""
    for made in [*worlds(), *more_worlds()]:
        old, new = Model(before, World(**made)), Model(after, World(**made))
        world = new.world
        for tokens in TOKENS:
            about = (made, tokens)
            if not world.dp:
                attention(old, new, tokens, about)
            if new.should_fuse is not None:
                experts(old, new, tokens, about)
            elif world.dp:
                check("predicate", bool(new.predicate(tokens)), False, *about)


def serves(model, tokens):
    """Whether the fused path can and may serve this world on SM 12.x."""
    world = model.world
    legacy = model.tree.file(FUSION).text.count("token_num or max_token_num") == 0
    whole = legacy or world.attn_tp == world.tp in (world.ep, world.moe_tp)
    reach = world.nnodes == 1 or not model.asks_nodes
    reach = reach and (world.pp == 1 or not legacy)
    return world.flag and not world.dp and whole and reach and not world.unavailable and admitted(world, tokens)


def attention(old, new, tokens, about):
    if new.world.sm // 10 in (9, 10):
        check("predicate", run(new.attention, tokens), run(old.attention, tokens), "attention", *about)
    else:
        fused, right = new.attention(tokens)
        check("sum", right, True, "attention", *about)
        check("predicate", bool(old.attention(tokens)[0]), False, "attention", *about)
        can = serves(new, tokens) and (new.gather is None or new.world.norm_can_fuse)
        if new.world.unavailable and "unavailable" not in new.file.text:
            return
        check("predicate", bool(fused), can, "attention", *about)


def experts(old, new, tokens, about):
    if new.world.sm // 10 in (9, 10):
        check("predicate", run(new.experts, tokens), run(old.experts, tokens), "experts", *about)
        return
    left, right = new.experts(tokens)
    check("sum", right, True, "experts", *about)
    if new.world.unavailable and "unavailable" not in new.file.text:
        return
    check("predicate", bool(left), serves(new, tokens) and new.world.norm_can_fuse, "experts", *about)


def run(function, tokens):
    """The function's answer, or the error that it ends in."""
    try:
        return function(tokens)
    except (AssertionError, AttributeError) as error:
        return type(error).__name__, False


def fallback(before, after):
    """The fused call declines, or does not: the sum is made once, over its ranks, and nothing is added twice."""
    cured = "deferred_post_experts_all_reduce" in before.file(NORM).text
    shared = Norm(before, World(120)).shared
    for sm, works, addend, (tp, ep) in itertools.product((90, 120), (True, False), (None, 7), ((2, 1), (4, 1), (4, 4), (8, 2))):
        for attn in (True, False) if shared else (True,):
            for tree in (before, after):
                world = World(sm, tp=tp, ep=ep, fused_works=works)
                world.one_group = not shared
                norm = Norm(tree, world)
                if addend is not None and "post_residual_addition" not in tree.file(NORM).text:
                    continue
                x, residual = Tensor(3, range(1, tp + 1)), Tensor(3, [100] * tp)
                post = None if addend is None else Tensor(3, [addend] * tp)
                y, new_residual = norm.fused(x, residual, post, use_attn_tp_group=attn)
                sums = list(world.sums)
                total = [100 + sum(x.parts) + (addend or 0)] * tp
                about = (sm, works, addend, tp, ep, attn, tree.root)
                drops_addend = works and not shared and "residual = residual + post" not in fused_source(tree)
                if drops_addend and addend is not None:
                    continue  # The fused call itself leaves it out: none of ours.
                hybrid = works and not attn and ep not in (1, tp)
                if hybrid:
                    continue  # The fused call sums over half of the ranks; see the note `hybrid-experts`.
                right = y.parts == new_residual.parts == total
                check("fallback", right, works or tree is after or cured, *about)
                if tree is after:
                    check("fallback", len([s for s in sums if sizes(world, s) > 1]), 2 if not attn and ep not in (1, tp) else 1, *about)
                    if shared:
                        check("fallback", residual.parts, [100] * tp, "the residual is left as it is", *about)


def fused_source(tree):
    return ast.unparse(tree.file(NORM).node("RMSNorm.forward_with_allreduce_fusion"))


def sizes(world, group):
    return {"tp": world.tp, "attn": world.attn_tp, "ep": world.ep, "moe_tp": world.moe_tp}[group]


class Manager:
    """A workspace manager that notes what it is told."""

    def __init__(self):
        self.initialized, self.made = False, []
        self.world_size = self.rank = self.group = self.workspace = self.hidden_dim = None
        self.backend, self.dtype, self.use_fp32_lamport = "trtllm", "bfloat16", False

    def initialize(self, world_size, rank, max_token_num, hidden_dim, **more):
        self.made.append(max_token_num)
        self.initialized, self.workspace = True, "workspace"
        self.world_size, self.rank, self.max_token_num, self.hidden_dim = world_size, rank, max_token_num, hidden_dim
        self.group = (more.get("device_group"), more.get("cpu_group"))

    def is_buffer_size_sufficient(self, token_num, **_):
        return token_num <= self.max_token_num


def ensure(tree, world, manager):
    file = tree.file(FUSION)
    group = SimpleNamespace(device_group="device", cpu_group="cpu", world_size=world.tp, rank_in_group=0)
    more = {
        "_flashinfer_comm": "comm",
        "_flashinfer_allreduce_unavailable": False,
        "_workspace_manager": manager,
        "_get_workspace_manager": lambda use_attn_tp_group: manager,
        "_sync_allreduce_unavailable_across_tp": lambda: None,
        "resolve_flashinfer_allreduce_fusion_backend": lambda *a: "trtllm",
        "resolve_fusion_group": lambda use_attn_tp_group: (world.tp, 0, group),
        **{name: lambda: group for name in ("get_tp_group", "get_attn_tp_group", "get_moe_ep_group", "get_moe_tp_group")},
    }
    (function,), _ = file.functions(world, "ensure_workspace_initialized", more=more)
    return function


def workspace(before, after):
    for made in worlds():
        if not made["flag"] or made["dp"] or made["ep"] > 1:
            continue
        for tree in (before, after):
            world, manager = World(**made), Manager()
            function = ensure(tree, world, manager)
            on_ours = tree is after and world.sm // 10 == 12 and world.package and world.in_force
            declined = on_ours and world.tp not in world.policy
            first = function(max_token_num=LIMIT, hidden_dim=8)
            again = function(max_token_num=LIMIT, hidden_dim=8)
            check("workspace", (first, again), (not declined,) * 2, made, tree.root)
            tokens = (world.workspace_tokens or LIMIT) if on_ours else LIMIT
            check("workspace", manager.made, [] if declined else [tokens], made, tree.root)


def backend(before, after):
    if not before.file(FUSION).has("_resolve_backend"):
        return
    for made, name, nodes in itertools.product(worlds(), ("auto", "trtllm", "mnnvl"), (False, True)):
        if not made["flag"] or made["dp"] or made["ep"] > 1:
            continue
        answers = []
        for tree in (before, after):
            world = World(**made)
            (resolve, _), _ = tree.file(FUSION).functions(world, "_resolve_backend", "_mnnvl_supported")
            try:
                answers.append(resolve(name, nodes))
            except ValueError:
                answers.append("error")
        was, now = answers
        ours = world.sm // 10 == 12 and world.package and world.in_force
        if ours:
            check("backend", was, "error", made, name, nodes)
            check("backend", now, "trtllm" if not nodes and name != "mnnvl" else "error", made, name, nodes)
        else:
            check("backend", now, was, made, name, nodes)


class Driver:
    """The CUDA driver: a GPU of major version 12 cannot tell a granularity of multicast."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1)
    CUmulticastGranularity_flags = SimpleNamespace(CU_MULTICAST_GRANULARITY_RECOMMENDED=1)
    CUmulticastObjectProp = SimpleNamespace

    def __init__(self, world):
        self.world, self.asked = world, 0

    def cuMemGetAllocationGranularity(self, *_):
        return 0, 2 << 20

    def cuMulticastGetGranularity(self, *_):
        self.asked += 1
        return (801, 0) if self.world.sm // 10 == 12 else (0, 512 << 20)


def preflight(before, after):
    name = "_flashinfer_trtllm_workspace_allocation_sizes"
    if not before.file(FUSION).has(name):
        return
    align = {"ceil_align": lambda size, to: (size + to - 1) // to * to}
    for made in worlds():
        if not made["flag"] or made["dp"] or made["ep"] > 1:
            continue
        answers = []
        for tree in (before, after):
            world = World(**made)
            driver = Driver(world)
            (function,), _ = tree.file(FUSION).functions(world, name, more=align)
            try:
                answers.append((function(driver, SimpleNamespace(requestedHandleTypes=1), world.tp, 2048, 4096, "bf16"), driver.asked))
            except RuntimeError:
                answers.append("error")
        if world.sm // 10 == 12 and world.package and world.in_force:
            check("preflight", answers[0], "error", made)
            data = world.tp * 2048 * 4096 * 2
            expected = [align["ceil_align"](size + 2048, 2 << 20) for size in (data, 2 << 20, data * 3)]
            check("preflight", answers[1], (expected, 0), made)
        else:
            check("preflight", answers[1], answers[0], made)


def plain_all_reduce(before, after):
    name = "can_use_flashinfer_allreduce"
    if not before.file(FUSION).has(name):
        return
    for made, tokens in itertools.product(worlds(), TOKENS):
        if not made["flag"] or made["dp"] or made["ep"] > 1:
            continue
        answers = []
        for tree in (before, after):
            world, manager = World(**made), Manager()
            manager.initialize(world.tp, 0, LIMIT, 8, device_group="device", cpu_group="cpu")
            more = {
                "_flashinfer_comm": "comm",
                "_flashinfer_allreduce_unavailable": False,
                "_get_workspace_manager": lambda use_attn_tp_group: manager,
            }
            (function,), _ = tree.file(FUSION).functions(world, name, more=more)
            answers.append(
                function(
                    Tensor(tokens, [0]),
                    use_attn_tp_group=True,
                    expected_world_size=world.tp,
                    expected_group_key=("device", "cpu"),
                )
            )
        was, now = answers
        if world.sm // 10 == 12 and world.package and world.in_force:
            limits = world.policy.get(world.tp)
            may = limits is not None and tokens <= (limits.get("max_tokens") or LIMIT)
            check("plain-all-reduce", now, was and may, made, tokens)
        else:
            check("plain-all-reduce", now, was, made, tokens)


def auto_enable(before, after):
    """The test that switches the fused path on, for a model that is listed."""
    if after.has(OVERRIDES) and after.file(OVERRIDES).has("_flashinfer_allreduce_fusion_auto_enable"):
        return overrides(before, after)
    tests = [the_test(tree.file(SERVER)) for tree in (before, after)]
    for made in worlds():
        if not made["flag"] or made["ep"] > 1:
            continue
        answers = []
        for tree, test in zip((before, after), tests):
            world = World(**made)
            me = SimpleNamespace(
                enable_flashinfer_allreduce_fusion=False,
                flashinfer_allreduce_fusion_backend=None,
                enable_dp_attention=world.dp,
                nnodes=1,
                tp_size=world.tp,
                attn_cp_size=1,
                moe_a2a_backend="none",
            )
            _, space = tree.file(SERVER).functions(world, more={"self": me, "model_arch": "Qwen3MoeForCausalLM", "is_h20_device": False})
            answers.append(bool(during(world, lambda: eval(test, space))()))
        switched(world, answers, made)


def switched(world, answers, made):
    was, now = answers
    ours = world.sm // 10 == 12 and world.package and world.in_force and world.tp in world.policy and not world.dp
    check("auto-enable", now, was or ours, made)


def the_test(file):
    """The condition of the statement that switches it on."""
    method = file.node("ServerArgs._handle_model_specific_adjustments")
    found = []
    for node in ast.walk(method):
        if isinstance(node, ast.If) and "KimiK25" in ast.unparse(node.test) or isinstance(node, ast.If) and "Glm4MoeForCausalLM" in ast.unparse(node.test):
            if any("flashinfer_allreduce_fusion" in ast.unparse(line) for line in node.body if isinstance(line, ast.Assign)):
                found.append(node.test)
    assert len(found) == 1, f"{len(found)} statements switch it on"
    return compile(ast.Expression(found[0]), file.path, "eval")


def overrides(before, after):
    for made in worlds():
        if not made["flag"] or made["ep"] > 1:
            continue
        answers = []
        for tree in (before, after):
            world = World(**made)
            config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["Listed"]), dtype="bfloat16")
            view = SimpleNamespace(
                flashinfer_allreduce_fusion_backend=None,
                get_model_config=lambda: config,
                tp_size=world.tp,
                enable_dp_attention=world.dp,
                nnodes=1,
                moe_a2a_backend="none",
                disable_custom_all_reduce=False,
            )
            more = {
                "_FLASHINFER_ALLREDUCE_FUSION_ARCHS": {"Listed"},
                "model_config_of": lambda view: config,
                "attn_dp_enabled_of": lambda view: view.enable_dp_attention,
            }
            (function,), _ = tree.file(OVERRIDES).functions(world, "_flashinfer_allreduce_fusion_auto_enable", more=more)
            answers.append(function(view) == {"flashinfer_allreduce_fusion_backend": "auto"})
        switched(world, answers, made)


def asked_early(after):
    """The package is asked while a file is imported: its first answer looks at files, which torch.compile cannot trace."""
    for path in (COMMUNICATOR, ADD_NORM, FUSION):
        if after.has(path) and "_fi_arch_admits" in after.file(path).text:
            world = World(120)
            after.file(path).functions(world)
            check("predicate", world.modules()["fi_arch_shim"].asked, 1, path)


def main():
    before = Tree(sys.argv[1])
    after = Tree(sys.argv[2], other=sys.argv[1])
    asked_early(after)
    predicate(before, after)
    fallback(before, after)
    workspace(before, after)
    backend(before, after)
    preflight(before, after)
    plain_all_reduce(before, after)
    if "--auto-enable" in sys.argv:
        auto_enable(before, after)
    print(json.dumps(cases))


if __name__ == "__main__":
    main()
