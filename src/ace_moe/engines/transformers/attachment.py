"""A plan put into one model, and the way back.

Put in: a decider as a child of every experts module; a view of the config there, so that the module looks up our
implementation and the model's own config is never touched; a subclass on routers that are taken over; hooks on each
stack; `generate` on the model. Everything goes back on `remove`, last change first.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import RLock
from typing import Any
from weakref import ref

from torch import nn
from transformers import PreTrainedModel

from ...budget import Phase
from ...checkpoint import Site
from ...checkpoint.structure import is_registered
from ...decider import Decider, Deciders, row_of
from ...errors import IntegrationError
from ...kernels import usable
from ...kernels.routing import recognise
from .experts import CHILD, IMPLEMENTATION, SENTINELS, UNRULED, Choice, choose_executor
from .generation import GenerateHook, listen
from .modules import base_of, device_of, leaves_sentinels_out, refuse_adapters, ruled, stack_of
from .passes import PASS, Pass, with_context

MINE = "_ace_attachment"  # on the model
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
    """Deciders in one model. On any error the model is left as it was."""

    def __init__(self, model: PreTrainedModel, deciders: Deciders, sites: list[Site], dispatch: Choice = "auto"):
        self.model, self.deciders, self.dispatch = ref(model), deciders, dispatch
        self.passes: dict[str, Pass] = {}  # by the path of a stack
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
            if getattr(model.get_submodule(site.path), CHILD, None) is not None:
                raise IntegrationError(
                    "This model already has a plan attached. Detach it first: `ace_moe.detach(model)`."
                )
            refuse_adapters(model, site)
            self._take_over_router(model, site, self._add(model, site))
        listen()
        if hasattr(type(model), "generate") and "generate" not in vars(model):
            hook = vars(model)["generate"] = GenerateHook(model, list(self.passes.values()))
            self._later(model, lambda m: m.__dict__.get("generate") is hook and m.__dict__.pop("generate"))
        vars(model).pop("_compiled_call", None)  # compiled calls are made again with a plan in them
        self._later(model, lambda m: m.__dict__.pop("_compiled_call", None))
        vars(model)[MINE] = self
        self._later(model, lambda m: m.__dict__.pop(MINE, None))

    def _later(self, module: nn.Module, undo: Undo) -> None:
        self._undo.append((ref(module), undo))

    def _set(self, module: nn.Module, name: str, value: object) -> None:
        before = getattr(module, name)
        setattr(module, name, value)
        self._later(module, lambda m: setattr(m, name, before))

    # ---- parts --------------------------------------------------------------------------------------------------

    def _follow(self, model: PreTrainedModel, site: Site) -> Pass:
        """Return the pass of the stack that holds this layer; the stack's hooks are put there with the first."""
        path, stack = stack_of(model, site.path)
        if path not in self.passes:
            cached = "past_key_values" in inspect.signature(stack.forward).parameters
            self.passes[path] = Pass(self.deciders, cached)
            setattr(stack, PASS, self.passes[path])
            before = stack.register_forward_pre_hook(Pass.begin, with_kwargs=True, prepend=True)
            after = stack.register_forward_hook(Pass.end, always_call=True)
            self._later(stack, lambda m: [m.__dict__.pop(PASS, None), before.remove(), after.remove()])  # type: ignore[func-returns-value]
        return self.passes[path]

    def _add(self, model: PreTrainedModel, site: Site) -> Decider:
        """Put a decider into an experts module, where transformers finds our implementation by the config it sees."""
        module = model.get_submodule(site.path)
        tokens, device = self._follow(model, site), device_of(module)
        chosen = choose_executor(module, device, self.dispatch, f"{site.path} ({type(module).__name__})")
        kernels = chosen.executor.name == "kernels" or (self.dispatch != "torch" and usable(device))
        extras = self.deciders.policy.extras(model, site)
        if extras is not None:
            self._later(module, lambda m: extras.remove())
        options = {"tokens": tokens, "device": device, "kernels": kernels, "extras": extras}
        decider = self.deciders.add(site.key, experts=site.num_experts, **options)
        decider.run_by(chosen)
        vars(decider)[HOLDER] = self
        self._experts[site.key] = ref(module)
        module.add_module(CHILD, decider)
        self._later(module, lambda m: delattr(m, CHILD))
        if hasattr(module, SENTINELS):
            self._set(module, SENTINELS, True)
        if is_registered(module):
            self._set(module, "config", ConfigView(module.config))
        else:
            self._hook_unregistered(site.path, module)
        return decider

    def _hook_unregistered(self, path: str, module: nn.Module) -> None:
        """Hook a class outside the registry that is called the same way, if its own loop leaves sentinel slots out."""
        if not leaves_sentinels_out(module):
            raise IntegrationError(
                f"{path} ({type(module).__name__}) is outside transformers' experts registry and its own loop does not "
                "leave skipped slots out, so skipping would save nothing. This family is not supported."
            )

        def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            decider = getattr(module, CHILD, None)
            return None if decider is None else (args[0], *decider.decide(args[1], args[2], args[0]), *args[3:])

        handle = module.register_forward_pre_hook(hook)
        self._later(module, lambda m: handle.remove())

    def _take_over_router(self, model: PreTrainedModel, site: Site, decider: Decider) -> None:
        """Decide at the router where it is a plain top-k: it and the rule become one kernel."""
        if decider.kernel is None or site.router_path is None:
            return
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

    # ---- for a while --------------------------------------------------------------------------------------------

    def with_context(self, **facts: Any) -> AbstractContextManager[None]:
        """Run passes with these facts known of them; see `PassContext`."""
        return with_context(list(self.passes.values()), **facts)

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Run passes all of whose tokens are of this phase, for callers that know."""
        return self.with_context(row=row_of(phase))

    @contextmanager
    def out(self, implementation: str) -> Iterator[None]:
        """Run the model as without a plan, its experts by transformers' own implementation of this name: graphs that were
        recorded with the plan stay good, so that both can be timed in turn."""
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
        """Run the router's own slots by our executors: what the rule itself costs."""
        undo: list[Callable[[], object]] = []
        for owner in self.experts():
            view = getattr(owner, "config", None)
            if isinstance(view, ConfigView):
                view._experts_implementation = implementation
                undo.append(partial(setattr, view, "_experts_implementation", IMPLEMENTATION))
        model = self.model()
        for router in model.modules() if model is not None else ():
            if (decider := vars(router).pop("ace_decider", None)) is not None:
                undo.append(partial(vars(router).update, ace_decider=decider))
        try:
            yield
        finally:
            for step in undo:
                step()

    def experts(self) -> list[nn.Module]:
        """List the experts modules in the order of their layers."""
        return [module for reference in self._experts.values() if (module := reference()) is not None]

    # ---- the way back -------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """True while there is a model, and our parts in it."""
        return bool(self._undo) and self.model() is not None

    def remove(self) -> None:
        """Put everything back, last change first."""
        with CHANGING:
            while self._undo:
                reference, undo = self._undo.pop()
                if (module := reference()) is not None:
                    undo(module)

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of an attached model is a model without a plan."""


# ---- whose plan is it -----------------------------------------------------------------------------------------------


def attached_to(model: nn.Module) -> Attachment | None:
    """Return the attachment a model has."""
    return getattr(model, MINE, None)


def attachments_in(model: Any) -> list[Attachment]:
    """Attachments with parts in a model: attached to itself, to what it is a part of, to a part of it, or inside a wrapper."""
    if not isinstance(model, nn.Module):
        base_of(model)  # says what a model is
    holders = (vars(m).get(HOLDER) for m in model.modules() if isinstance(m, Decider))
    return list(dict.fromkeys(holder for holder in holders if holder is not None))
