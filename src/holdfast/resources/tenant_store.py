"""A tenant's view of the store. It contains only the tenant's items."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from langgraph.store.base import (
    BaseStore,
    GetOp,
    Item,
    ListNamespacesOp,
    MatchCondition,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
)

from holdfast.resources.store import FoundItems

# Each tenant has a namespace below this one; the tenant sees its namespaces without this prefix. LangGraph defines the
# tables, so there is no column for the tenant.
ROOT = "~tenant"

Namespace = tuple[str, ...]


class TenantStore(BaseStore):
    """A tenant's view of a store: for the routes, and for the graph code of its runs."""

    def __init__(self, store: BaseStore, tenant_id: str) -> None:
        self._store = store
        self._root: Namespace = (ROOT, tenant_id)
        self.supports_ttl = store.supports_ttl
        self.ttl_config = store.ttl_config

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        asked = list(ops)
        return [self._result(result) for result in self._store.batch([self._op(op) for op in asked])]

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        asked = list(ops)
        return [self._result(result) for result in await self._store.abatch([self._op(op) for op in asked])]

    def _op(self, op: Op) -> Op:
        match op:
            case GetOp() | PutOp():
                return op._replace(namespace=(*self._root, *op.namespace))
            case SearchOp():
                return op._replace(namespace_prefix=(*self._root, *op.namespace_prefix))
            case ListNamespacesOp():
                own = MatchCondition(match_type="prefix", path=self._root)
                asked = [self._condition(condition) for condition in op.match_conditions or ()]
                depth = None if op.max_depth is None else op.max_depth + len(self._root)
                return op._replace(match_conditions=(own, *asked), max_depth=depth)
        raise TypeError(f"{type(op).__name__} is no operation of a store")

    def _condition(self, condition: MatchCondition) -> MatchCondition:
        if condition.match_type == "suffix":
            return condition
        return condition._replace(path=(*self._root, *condition.path))

    def _result(self, result: Result) -> Result:
        if isinstance(result, FoundItems):
            items = FoundItems(self._below_root(one) for one in result)
            items.more = result.more
            return items
        if isinstance(result, list):
            return [self._below_root(one) for one in result]
        shown: Item | None = self._below_root(result)
        return shown

    def _below_root(self, found: Any) -> Any:
        """The items with the namespaces that the tenant knows. Items are copied, because other callers may share the
        originals."""
        if isinstance(found, tuple):
            return self._stripped(found)
        if isinstance(found, SearchItem):
            return SearchItem(
                self._stripped(found.namespace), found.key, found.value, found.created_at, found.updated_at, found.score
            )
        if isinstance(found, Item):
            return Item(
                namespace=self._stripped(found.namespace),
                key=found.key,
                value=found.value,
                created_at=found.created_at,
                updated_at=found.updated_at,
            )
        return found

    def _stripped(self, namespace: Namespace) -> Namespace:
        if namespace[: len(self._root)] != self._root:
            # A safeguard: another tenant's item is never returned, even if the search has a defect.
            raise RuntimeError("the store returned something of another tenant")
        return namespace[len(self._root) :]


def store_of(store: BaseStore | None, tenant_id: str | None) -> BaseStore | None:
    """The store that a user of the tenant sees. Without tenants, the whole store."""
    return TenantStore(store, tenant_id) if store is not None and tenant_id else store
