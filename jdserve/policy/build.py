"""From a plan to its machines."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from jdserve.core.plan import ColocatedInstance, DecodeInstance, Instance, Plan, PrefillInstance
from jdserve.policy.base import Machine
from jdserve.policy.colocated import ColocatedScheduler
from jdserve.policy.decode import DecodeScheduler
from jdserve.policy.prefill import PrefillScheduler
from jdserve.policy.router import Balance, Router


class RouterConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="router", tag_field="role"
):
    """Arguments of a :class:`Router`, in a form that can be written down.

    Attributes:
        prefill, decode, colocated: names of the instances, in the order of the plan.
        max_retries, balance: as in the router.
    """

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    colocated: tuple[str, ...] = ()
    max_retries: Annotated[int, Meta(ge=0)] = 3
    balance: Balance = "tokens"

    @classmethod
    def of(cls, plan: Plan) -> RouterConfig:
        """The router that serves ``plan``."""

        def names(role: type[Instance]) -> tuple[str, ...]:
            return tuple(instance.name for instance in plan.instances if isinstance(instance, role))

        return cls(prefill=names(PrefillInstance), decode=names(DecodeInstance), colocated=names(ColocatedInstance))


def machine_for(instance: Instance, page_size: int) -> PrefillScheduler | DecodeScheduler | ColocatedScheduler:
    """The scheduler of ``instance``, with pages of ``page_size`` token positions."""
    match instance:
        case PrefillInstance():
            return PrefillScheduler(instance, page_size)
        case DecodeInstance():
            return DecodeScheduler(instance, page_size)
        case ColocatedInstance():
            return ColocatedScheduler(instance, page_size)


def router_for(plan: Plan) -> Router:
    """The router over the instances of ``plan``."""
    return _router(RouterConfig.of(plan))


def machine_of(config: Instance | RouterConfig, page_size: int) -> Machine:
    """The machine that ``config`` describes; a router has no use for ``page_size``."""
    return _router(config) if isinstance(config, RouterConfig) else machine_for(config, page_size)


def _router(config: RouterConfig) -> Router:
    return Router(config.prefill, config.decode, config.colocated, config.max_retries, config.balance)
