"""Weights by themselves: loading them under other names.

Example:
    >>> from varvite.weights import plan_keys
    >>> plan = plan_keys(["model.encoder.weight"], ["model.body.weight"], {"model.encoder": "model.body"})
    >>> plan.mapping
    {'model.body.weight': 'model.encoder.weight'}
"""

from __future__ import annotations

from varvite.weights.rules import KeyPlan, KeyRules, plan_keys

__all__ = ["KeyPlan", "KeyRules", "plan_keys"]
