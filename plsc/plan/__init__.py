"""What fits where and how long a step takes, before a GPU is rented: a plan, not a measurement."""

from plsc.plan.advice import CapacityError as CapacityError
from plsc.plan.devices import DEVICES as DEVICES
from plsc.plan.devices import Device as Device
from plsc.plan.devices import link_speed as link_speed
from plsc.plan.devices import measure_device as measure_device
from plsc.plan.devices import named_device as named_device
from plsc.plan.devices import parse_memory as parse_memory
from plsc.plan.estimate import Machine as Machine
from plsc.plan.planner import Plan as Plan
from plsc.plan.planner import plan as plan
from plsc.plan.timing import Links as Links
