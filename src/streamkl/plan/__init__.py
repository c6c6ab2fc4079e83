"""What a distillation costs before it runs: memory, traffic and arithmetic of a step, from a model's config.

Formulas only, without torch; ``docs/scale.md`` derives them and tests count what they predict. ``streamkl plan`` prints
them.
"""

from streamkl.plan.assumptions import Assumptions
from streamkl.plan.choice import Plan, choose, plan
from streamkl.plan.model import Model, read
from streamkl.plan.run import Run
from streamkl.plan.traffic import Exchange, exchange

__all__ = ["Assumptions", "Exchange", "Model", "Plan", "Run", "choose", "exchange", "plan", "read"]
