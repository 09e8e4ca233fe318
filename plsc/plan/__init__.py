"""Plan memory and time of a training run before a GPU is rented: a model, not a measurement."""

from plsc.devices import DEVICES as DEVICES
from plsc.devices import Device as Device
from plsc.devices import measure_device as measure_device
from plsc.plan.advice import CapacityError as CapacityError
from plsc.plan.advice import Hardware as Hardware
from plsc.plan.devices import Links as Links
from plsc.plan.devices import link_speed as link_speed
from plsc.plan.devices import named_device as named_device
from plsc.plan.devices import parse_memory as parse_memory
from plsc.plan.planner import Plan as Plan
from plsc.plan.planner import plan as plan
from plsc.plan.strategy_choice import StrategyChoice as StrategyChoice
from plsc.plan.strategy_choice import choose_strategy as choose_strategy
