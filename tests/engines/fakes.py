"""Runs single functions of SGLang and FlashInfer, taken out of their files by syntax tree, among fakes.

One process plays all ranks at once: a `Tensor` holds the part of each rank, so that a sum that was left out, made twice or made over
the wrong ranks shows in the numbers.
"""

import ast
import copy
import os
import sys
import types
from types import SimpleNamespace


class Tensor:
    """A tensor of `tokens` rows; `parts` has one number a rank."""

    def __init__(self, tokens, parts):
        self.shape = (tokens, 8)
        self.parts = list(parts)
        self.dtype = "bfloat16"
        self.ndim = 2
        self.device = "cuda"

    def __add__(self, other):
        return Tensor(self.shape[0], [a + b for a, b in zip(self.parts, other.parts)])

    def clone(self):
        return Tensor(self.shape[0], self.parts)

    def is_contiguous(self):
        return True

    def element_size(self):
        return 2

    def numel(self):
        return self.shape[0] * self.shape[1]


class Shim(types.ModuleType):
    """The package fi_arch_shim, as far as edits ask it."""

    def __init__(self, world):
        super().__init__("fi_arch_shim")
        self.world = world
        self.asked = 0

    def in_force(self):
        return self.world.in_force

    def admits(self, tokens=None, ranks=None):
        self.asked += 1
        if not self.world.in_force or self.world.sm // 10 != 12:
            return False
        if ranks is None:
            return True
        limits = self.world.policy.get(ranks)
        return limits is not None and (tokens is None or limits.get("max_tokens") is None or tokens <= limits["max_tokens"])

    def workspace_tokens(self, default):
        return self.world.workspace_tokens or default if self.admits() else default

    def oneshot(self, tokens, ranks, default):
        limit = self.world.policy.get(ranks, {}).get("oneshot_tokens") if self.admits() else None
        return default if limit is None else tokens <= limit


class Switches:
    """Environment variables of SGLang, none of which is set."""

    def __getattr__(self, name):
        return SimpleNamespace(get=lambda: False)


class World:
    """A machine, a command line, a policy, and the state of our package."""

    def __init__(self, sm, **changes):
        self.sm = sm
        self.flag = True
        self.dp = False
        self.tp = 2
        self.ep = 1
        self.moe_tp = None
        self.attn_tp = None
        self.pp = 1
        self.nnodes = 1
        self.package = True
        self.in_force = True
        self.policy = {2: {}}
        self.workspace_tokens = None
        self.fused_works = True
        self.unavailable = False
        self.norm_can_fuse = True
        self.__dict__.update(changes)
        self.moe_tp = self.moe_tp or self.tp // self.ep
        self.attn_tp = self.attn_tp or (1 if self.dp else self.tp)
        self.sums = []

    def is_sm(self, major):
        return self.sm // 10 == major

    def reduce(self, x, group):
        """The sum over a group, at each rank."""
        self.sums.append(group)

        def peers(rank):
            ranks = range(self.tp)
            return {
                "tp": ranks,
                "attn": [r for r in ranks if r // self.attn_tp == rank // self.attn_tp],
                "ep": [r for r in ranks if r % self.moe_tp == rank % self.moe_tp],
                "moe_tp": [r for r in ranks if r // self.moe_tp == rank // self.moe_tp],
            }[group]

        return Tensor(x.shape[0], [sum(x.parts[r] for r in peers(rank)) for rank in range(self.tp)])

    def fused(self, input_tensor, residual, weight, eps, max_token_num=2048, use_attn_tp_group=True, **_):
        """FlashInfer's fused call: sum, residual and norm, into new tensors; or (None, None)."""
        self.fused_calls = getattr(self, "fused_calls", 0) + 1
        if not self.fused_works:
            return None, None
        room = self.workspace_tokens if self.sm // 10 == 12 and self.in_force and self.workspace_tokens else 2048
        assert input_tensor.shape[0] <= min(room, max_token_num), "more tokens than the workspace holds"
        group = "attn" if use_attn_tp_group else ("ep" if self.ep > 1 else "moe_tp")
        if self.one_group:
            group = "tp"
        y = self.reduce(input_tensor, group) + residual
        return y.clone(), y

    one_group = False

    def server_args(self):
        return SimpleNamespace(
            enable_flashinfer_allreduce_fusion=self.flag,
            flashinfer_allreduce_fusion_backend="trtllm" if self.flag else None,
            nnodes=self.nnodes,
            attn_cp_size=1,
            enable_aiter_allreduce_fusion=False,
            enable_quant_communications=False,
            speculative_algorithm=None,
        )

    def parallel(self):
        return SimpleNamespace(
            tp_size=self.tp,
            attn_tp_size=self.attn_tp,
            attn_tp_rank=0,
            moe_ep_size=self.ep,
            moe_ep_rank=0,
            moe_tp_size=self.moe_tp,
            moe_tp_rank=0,
            nnodes=self.nnodes,
        )

    def modules(self):
        """The modules that functions import while they run."""
        if self.made is None:
            self.made = self.make_modules()
        return self.made

    made = None

    def make_modules(self):
        distributed = {
            "get_tensor_model_parallel_world_size": lambda: self.tp,
            "get_attn_tensor_model_parallel_world_size": lambda: self.attn_tp,
            "get_attn_tensor_model_parallel_rank": lambda: 0,
            "get_moe_expert_parallel_world_size": lambda: self.ep,
            "get_moe_expert_parallel_rank": lambda: 0,
            "get_moe_tensor_parallel_world_size": lambda: self.moe_tp,
            "get_moe_tensor_parallel_rank": lambda: 0,
            "tensor_model_parallel_all_reduce": lambda x: self.reduce(x, "tp"),
            "attention_tensor_model_parallel_all_reduce": lambda x: self.reduce(x, "attn"),
            "moe_expert_parallel_all_reduce": lambda x: self.reduce(x, "ep"),
            "moe_tensor_model_parallel_all_reduce": lambda x: self.reduce(x, "moe_tp"),
            "tensor_model_parallel_fused_allreduce_rmsnorm": None,
        }
        both = lambda x: self.reduce(self.reduce(x, "ep"), "moe_tp")
        made = {
            "sglang": {},
            "sglang.srt": {},
            "sglang.srt.distributed": distributed,
            "sglang.srt.layers": {},
            "sglang.srt.layers.flashinfer_comm_fusion": {"flashinfer_allreduce_residual_rmsnorm": self.fused},
            "sglang.srt.layers.moe": {},
            "sglang.srt.layers.moe.utils": {"deferred_post_experts_all_reduce": both},
        }
        modules = {}
        for name, content in made.items():
            modules[name] = types.ModuleType(name)
            modules[name].__dict__.update(content)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(modules[parent], child, modules[name])
        # `None` makes an import fail, as a package that is gone does.
        modules["fi_arch_shim"] = Shim(self) if self.package else None
        return modules

    def names(self):
        """The globals of the functions that are run."""
        args = self.server_args()
        platform = SimpleNamespace(
            is_sm90=self.is_sm(9),
            is_sm100=self.is_sm(10),
            is_sm120=self.is_sm(12),
            is_blackwell=self.is_sm(10) or self.is_sm(12),
        )
        distributed = self.modules()["sglang.srt.distributed"].__dict__
        return {
            **{name: value for name, value in distributed.items() if not name.startswith("__")},
            "torch": SimpleNamespace(
                distributed=SimpleNamespace(get_world_size=lambda: self.tp * self.pp),
                compiler=SimpleNamespace(is_compiling=lambda: False),
                float16="float16",
                float32="float32",
                bfloat16="bfloat16",
                cuda=SimpleNamespace(current_device=lambda: 0),
            ),
            "dist": SimpleNamespace(get_rank=lambda: 0),
            "logger": SimpleNamespace(warning=lambda *a: None, info=lambda *a: None, debug=lambda *a: None),
            "_is_cuda": True,
            "_is_npu": False,
            "_use_aiter": False,
            "_is_gfx95_supported": False,
            "_is_sm90_supported": self.is_sm(9),
            "_is_sm100_supported": self.is_sm(10),
            "_is_flashinfer_available": True,
            "is_flashinfer_available": lambda: True,
            "is_cuda": lambda: True,
            "is_sm90_supported": lambda: self.is_sm(9),
            "is_sm100_supported": lambda: self.is_sm(10),
            "is_blackwell_supported": lambda: self.is_sm(10) or self.is_sm(12),
            "supports_custom_op": lambda: False,
            "is_dp_attention_enabled": lambda: self.dp,
            "is_enable_moe_cp_allgather": lambda: False,
            "is_flashinfer_allreduce_unavailable": lambda: self.unavailable,
            "uses_cutedsl_ar_fusion": lambda: False,
            "apply_aiter_all_reduce_fusion": lambda *a: False,
            "get_global_server_args": lambda: args,
            "get_server_args": lambda: args,
            "get_exec": lambda: SimpleNamespace(comm=args),
            "get_parallel": self.parallel,
            "get_platform": lambda: platform,
            "get_attn_tp_context": lambda: SimpleNamespace(input_scattered=False, is_dsa=False),
            "get_moe_a2a_backend": lambda: SimpleNamespace(is_none=lambda: True),
            "SpeculativeAlgorithm": SimpleNamespace(from_string=lambda name: SimpleNamespace(is_eagle=lambda: False)),
            "ScatterMode": SimpleNamespace(SCATTERED="scattered", TP_ATTN_FULL="full", MOE_FULL="moe"),
            "FUSE_ALLREDUCE_MAX_BATCH_SIZE": 2048,
            "Optional": None,
            "envs": Switches(),
        }


class File:
    """A Python file, before or after the edits."""

    def __init__(self, root, path):
        self.path = os.path.join(root, path)
        with open(self.path, encoding="utf-8") as file:
            self.text = file.read()
        self.tree = ast.parse(self.text)
        compile(self.text, self.path, "exec")
        self.codes = {}

    def node(self, name):
        """The definition of a qualified name."""
        node = self.tree
        for part in name.split("."):
            found = [n for n in node.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == part]
            assert len(found) == 1, f"{self.path}: {len(found)} × {name}"
            node = found[0]
        return node

    def has(self, name):
        try:
            self.node(name)
        except AssertionError:
            return False
        return True

    def functions(self, world, *names, more=None):
        """The functions of these names, among the world's fakes and with the helpers that edits have appended."""
        if names not in self.codes:
            body = [plain(copy.deepcopy(self.node(name))) for name in names]
            body += [node for node in self.tree.body if is_ours(node)]
            module = ast.fix_missing_locations(ast.Module(body=body, type_ignores=[]))
            self.codes[names] = compile(module, self.path, "exec")
        space = {**world.names(), **(more or {})}
        with imports(world):
            exec(self.codes[names], space)
        return [during(world, space[name.rpartition(".")[2]]) for name in names], space


def is_ours(node):
    """Whether a statement of a file was appended by an edit."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name.startswith("_fi_arch")
    return "_fi_arch" in ast.unparse(node)


def plain(function):
    """A function without decorators and annotations."""
    function.decorator_list = []
    function.returns = None
    arguments = function.args
    for argument in arguments.args + arguments.kwonlyargs + arguments.posonlyargs:
        argument.annotation = None
    return function


class imports:
    """While it lasts, `import` sees the world's modules. One may stand in another."""

    def __init__(self, world):
        self.modules = world.modules()

    def __enter__(self):
        self.before = {name: sys.modules.get(name, imports) for name in self.modules}
        sys.modules.update(self.modules)

    def __exit__(self, *_):
        for name, module in self.before.items():
            if module is imports:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def during(world, function):
    def run(*args, **kwargs):
        with imports(world):
            return function(*args, **kwargs)

    return run
