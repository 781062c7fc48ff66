"""From a plan to its machines."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from jdserve.core.pages import PagePool
from jdserve.core.plan import ColocatedInstance, DecodeInstance, Instance, Plan, PrefillInstance
from jdserve.core.steptime import QueueTime
from jdserve.policy.base import Machine
from jdserve.policy.colocated import ColocatedScheduler
from jdserve.policy.decode import DecodeScheduler
from jdserve.policy.prefill import PrefillScheduler
from jdserve.policy.router import MAX_RETRIES, Balance, Router


class RouterConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="router", tag_field="role"
):
    """Arguments of a :class:`Router`, in a form that can be written down.

    Attributes:
        prefill, decode, colocated: names of the instances, in the order of the plan.
        max_retries, balance, max_open, patience_s, near, queueing, max_wait_s: as in the router.
    """

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    colocated: tuple[str, ...] = ()
    max_retries: Annotated[int, Meta(ge=0)] = MAX_RETRIES
    balance: Balance = "tokens"
    max_open: Annotated[int, Meta(ge=1)] | None = None
    patience_s: Annotated[float, Meta(ge=0)] = 0.0
    near: dict[str, tuple[str, ...]] = {}
    queueing: dict[str, QueueTime] = {}
    max_wait_s: Annotated[float, Meta(gt=0)] | None = None

    @classmethod
    def of(cls, plan: Plan, patience_s: float = 0.0) -> RouterConfig:
        """The router that serves ``plan``."""

        def names(role: type[Instance]) -> tuple[str, ...]:
            return tuple(instance.name for instance in plan.instances if isinstance(instance, role))

        return cls(
            prefill=names(PrefillInstance),
            decode=names(DecodeInstance),
            colocated=names(ColocatedInstance),
            max_open=plan.max_open_requests,
            patience_s=patience_s,
            queueing=_queueing(plan) if plan.shed else {},
            max_wait_s=plan.slo.ttft_s if plan.shed and plan.slo is not None else None,
            near={name: plan.near(name) for name in names(PrefillInstance) if plan.near(name)},
        )


def _queueing(plan: Plan) -> dict[str, QueueTime]:
    """What is known of the instances that only compute prompts: elsewhere the tokens to come are counted too."""
    return {
        instance.name: QueueTime(instance.steptime, instance.lm_tokens, instance.pp)
        for instance in plan.instances
        if isinstance(instance, PrefillInstance) and instance.steptime is not None
    }


def machine_for(
    instance: Instance, page_size: int, *, pool: PagePool | None = None, brief: bool = False
) -> PrefillScheduler | DecodeScheduler | ColocatedScheduler:
    """The scheduler of ``instance``, with pages of ``page_size`` token positions; the others as in its class."""
    match instance:
        case PrefillInstance():
            return PrefillScheduler(instance, page_size, pool=pool, brief=brief)
        case DecodeInstance():
            return DecodeScheduler(instance, page_size, pool=pool, brief=brief)
        case ColocatedInstance():
            return ColocatedScheduler(instance, page_size, pool=pool, brief=brief)


def router_of(config: RouterConfig) -> Router:
    """The router that ``config`` describes."""
    return Router(
        config.prefill,
        config.decode,
        config.colocated,
        max_retries=config.max_retries,
        balance=config.balance,
        max_open=config.max_open,
        patience_s=config.patience_s,
        near=config.near,
        queueing=config.queueing,
        max_wait_s=config.max_wait_s,
    )


def router_for(plan: Plan) -> Router:
    """The router over the instances of ``plan``, all of which stay dead once they died."""
    return router_of(RouterConfig.of(plan))


def machine_of(config: Instance | RouterConfig, page_size: int) -> Machine:
    """The machine that ``config`` describes; a router has no use for ``page_size``."""
    return router_of(config) if isinstance(config, RouterConfig) else machine_for(config, page_size)
