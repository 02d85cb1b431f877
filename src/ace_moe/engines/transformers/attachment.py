"""A plan put into one model, and the way back.

Put in: a decider as a child of every experts module; a view of the config there, so that the module looks up our
implementation and the model's own config is never touched; a subclass on routers that are taken over; hooks on each
stack; `generate` on the model. Everything goes back on `remove`, last change first.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import RLock
from typing import Any
from weakref import ref

from torch import nn
from transformers import PreTrainedModel

from ...checkpoint import Site
from ...checkpoint.structure import is_registered
from ...decider import Decider, Deciders, row_of
from ...decider.executors import SENTINELS
from ...errors import IntegrationError
from ...kernels import usable
from .experts import CHILD, IMPLEMENTATION, UNRULED, Choice, choose_executor
from .generation import GenerateHook, listen
from .modules import base_of, device_of, leaves_sentinels_out, refuse_adapters, ruled, stack_of
from .passes import Pass

MINE, PASS = "_ace_attachment", "_ace_pass"  # on the model, and on each of its stacks
HOLDER = "_attachment"  # on each of our layers
Undo = Callable[[Any], object]
CHANGING = RLock()  # one thread at a time changes models: two that attach to one would both find it free


class ConfigView:
    """The config an experts module sees: ours as its implementation, all else as it is."""

    def __init__(self, config: Any):
        self._config, self._experts_implementation = config, IMPLEMENTATION

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._config, memo)


class Attachment:
    """A deciders in one model. On any error the model is left as it was."""

    def __init__(self, model: PreTrainedModel, deciders: Deciders, sites: list[Site], dispatch: Choice = "auto"):
        self.model, self.deciders, self.dispatch = ref(model), deciders, dispatch
        self.passes: dict[str, Pass] = {}
        self._experts: dict[str, ref[nn.Module]] = {}  # by layer key
        # weak: a model that its user drops without detaching is gone
        self._undo: list[tuple[ref[nn.Module], Undo]] = []
        with CHANGING:
            try:
                self._install(model, sites)
            except BaseException:
                self.remove()
                raise

    def _install(self, model: PreTrainedModel, sites: list[Site]) -> None:
        for site in sites:
            module = model.get_submodule(site.path)
            if getattr(module, CHILD, None) is not None:
                raise IntegrationError(
                    "This model already has a plan attached. Detach it first: `ace_moe.detach(model)`."
                )
            refuse_adapters(model, site)
            stack = self._pass(model, site.path)
            decider = self._add(model, module, site, stack)
            if not is_registered(module):
                self._hook_unregistered(site.path, module)
            self._take_over_router(model, site, decider)
        self._tell(model)
        vars(model)[MINE] = self
        self._later(model, lambda m: m.__dict__.pop(MINE, None))

    def _later(self, module: nn.Module, undo: Undo) -> None:
        self._undo.append((ref(module), undo))

    # ---- experts ------------------------------------------------------------------------------------------------

    def _add(self, model: PreTrainedModel, module: nn.Module, site: Site, stack: Pass) -> Decider:
        device = device_of(module)
        chosen = choose_executor(module, device, self.dispatch, f"{site.path} ({type(module).__name__})")
        kernels = chosen.executor.name == "kernels" or (self.dispatch != "torch" and usable(device))
        extras = self.deciders.policy.extras(model, site)
        if extras is not None:
            self._later(module, lambda m: extras.remove())
        options = {"tokens": stack, "device": device, "kernels": kernels, "extras": extras}
        decider = self.deciders.add(site.key, experts=site.num_experts, **options)
        decider.run_by(chosen)
        vars(decider)[HOLDER] = self
        self._experts[site.key] = ref(module)
        module.add_module(CHILD, decider)
        self._later(module, lambda m: delattr(m, CHILD))
        if is_registered(module):
            self._set(module, "config", ConfigView(module.config))
        if hasattr(module, SENTINELS):
            self._set(module, SENTINELS, True)
        return decider

    def _set(self, module: nn.Module, name: str, value: object) -> None:
        before = getattr(module, name)
        setattr(module, name, value)
        self._later(module, lambda m: setattr(m, name, before))

    def _hook_unregistered(self, path: str, module: nn.Module) -> None:
        """A class outside the registry that is called the same way, if its own loop leaves sentinel slots out."""
        if not leaves_sentinels_out(module):
            raise IntegrationError(
                f"{path} ({type(module).__name__}) is outside transformers' experts registry and its own loop does not "
                "leave skipped slots out, so skipping would save nothing. This family is not supported."
            )

        def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            here = getattr(module, CHILD, None)
            return None if here is None else (args[0], *here.decide(args[1], args[2], args[0]), *args[3:])

        handle = module.register_forward_pre_hook(hook)
        self._later(module, lambda m: handle.remove())

    # ---- routers ------------------------------------------------------------------------------------------------

    def _take_over_router(self, model: PreTrainedModel, site: Site, decider: Decider) -> None:
        """Where the router is a plain top-k, it and the rule become one kernel: the layer then decides at the router."""
        if decider.kernel is None or site.router_path is None:
            return
        from ...kernels.routing import recognise

        router = model.get_submodule(site.router_path)
        kind = None if "forward" in vars(router) else recognise(router, site.top_k)
        if kind is None:
            return
        decider.decide_at_router()
        stock = type(router)
        router.__class__ = ruled(stock)  # type: ignore[arg-type]
        vars(router).update(ace_decider=decider, ace_kind=kind)

        def give_back(router: nn.Module) -> None:
            router.__class__ = stock
            for name in ("ace_decider", "ace_kind"):
                vars(router).pop(name, None)

        self._later(router, give_back)

    # ---- passes -------------------------------------------------------------------------------------------------

    def _pass(self, model: PreTrainedModel, path: str) -> Pass:
        """The pass of the stack that holds this experts module."""
        where, stack = stack_of(model, path)
        if where not in self.passes:
            cached = "past_key_values" in _parameters(stack)
            made = self.passes[where] = Pass(self.deciders, cached)
            setattr(stack, PASS, made)
            before = stack.register_forward_pre_hook(_begin, with_kwargs=True, prepend=True)
            after = stack.register_forward_hook(_end, always_call=True)
            self._later(stack, lambda m: [m.__dict__.pop(PASS, None), *(h.remove() for h in (before, after))])  # type: ignore[func-returns-value]
        return self.passes[where]

    def _tell(self, model: PreTrainedModel) -> None:
        """Have `generate` and continuous batching say where prompts end; compiled calls are made again with a plan in them."""
        listen()
        if hasattr(type(model), "generate") and "generate" not in vars(model):
            told = vars(model)["generate"] = GenerateHook(model, list(self.passes.values()))
            self._later(model, lambda m: m.__dict__.get("generate") is told and m.__dict__.pop("generate"))
        vars(model).pop("_compiled_call", None)
        self._later(model, lambda m: m.__dict__.pop("_compiled_call", None))

    @contextmanager
    def with_context(self, **facts: Any) -> Iterator[None]:
        """Run passes with these facts known of them; see `PassContext`."""
        before = [p.context for p in self.passes.values()]
        for one in self.passes.values():
            one.set_context(one.context._replace(**facts))
        try:
            yield
        finally:
            for one, context in zip(self.passes.values(), before, strict=True):
                one.set_context(context)

    def phase(self, phase: str) -> AbstractContextManager[None]:
        """Inside, every token of a pass is of this phase, for callers that know."""
        return self.with_context(row=row_of(phase))  # type: ignore[arg-type]

    @contextmanager
    def out(self, implementation: str) -> Iterator[None]:
        """Inside, the model runs as without a plan, its experts by transformers' own implementation of this name: graphs that
        were recorded with the plan stay good, so that both can be timed in turn."""
        model, undo = self.model(), list[Callable[[], object]]()
        for owner in self.experts():
            undo.append(partial(owner.add_module, CHILD, owner._modules.pop(CHILD)))
            if hasattr(owner, SENTINELS):
                undo.append(partial(setattr, owner, SENTINELS, getattr(owner, SENTINELS)))
                setattr(owner, SENTINELS, False)
        vars(model).pop(MINE, None)
        try:
            with self.unruled(implementation):
                yield
        finally:
            vars(model)[MINE] = self
            for step in undo:
                step()

    @contextmanager
    def unruled(self, implementation: str = UNRULED) -> Iterator[None]:
        """Inside, our executors run the router's own slots: what the rule itself costs."""
        undo: list[Callable[[], object]] = []
        for owner in self.experts():
            view = getattr(owner, "config", None)
            if isinstance(view, ConfigView):
                view._experts_implementation = implementation
                undo.append(partial(setattr, view, "_experts_implementation", IMPLEMENTATION))
        model = self.model()
        for router in model.modules() if model is not None else ():
            if (held := vars(router).pop("ace_decider", None)) is not None:
                undo.append(partial(vars(router).update, ace_decider=held))
        try:
            yield
        finally:
            for step in undo:
                step()

    def experts(self) -> list[nn.Module]:
        """The experts modules, in the order of their layers."""
        return [module for one in self._experts.values() if (module := one()) is not None]

    @property
    def active(self) -> bool:
        """Whether there is a model, and our parts in it."""
        return bool(self._undo) and self.model() is not None

    def remove(self) -> None:
        """Put everything back, last change first."""
        with CHANGING:
            while self._undo:
                module, undo = self._undo.pop()
                if (found := module()) is not None:
                    undo(found)

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of an attached model is a model without a plan."""


# ---- parts ----------------------------------------------------------------------------------------------------------


def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    one = getattr(module, PASS, None)  # a copy of an attached model has the hooks and no pass
    if one is not None:
        one.begin(module, args, kwargs)


def _end(module: nn.Module, *_: Any) -> None:
    one = getattr(module, PASS, None)
    if one is not None:
        one.end()


def _parameters(module: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(module.forward).parameters


# ---- whose plan is it -----------------------------------------------------------------------------------------------


def attached_to(model: nn.Module) -> Attachment | None:
    """The attachment a model has."""
    return getattr(model, MINE, None)


def attachments_in(model: Any) -> list[Attachment]:
    """Those whose parts are in a model: attached to itself, to what it is a part of, to a part of it, or inside a wrapper."""
    if not isinstance(model, nn.Module):
        base_of(model)  # says what a model is
    held = (vars(m).get(HOLDER) for m in model.modules() if isinstance(m, Decider))
    return list(dict.fromkeys(a for a in held if a is not None))
