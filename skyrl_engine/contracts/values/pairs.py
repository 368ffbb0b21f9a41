"""Preference pairs: units of a chosen and a rejected sample, told apart by the sample value `role`."""

from collections.abc import Mapping

import numpy as np

from skyrl_engine.contracts.values.ragged import AnyArray, IntArray
from skyrl_engine.contracts.values.roles import CHOSEN, REJECTED, ROLE, ROLES
from skyrl_engine.errors import DataError

_REMEDY = "Give every unit one sample of role 0 (chosen) and one of role 1 (rejected)"


def roles_in(sample_values: Mapping[str, AnyArray]) -> IntArray | None:
    """int64[N]: the role of every sample; None where samples have none. Raises DataError for a role other than 0 and 1."""
    role_values = sample_values.get(ROLE)
    if role_values is None:
        return None
    known = (
        np.isin(role_values, (CHOSEN, REJECTED)) if role_values.dtype.kind in "iuf" else np.zeros(len(role_values), dtype=np.bool_)
    )
    if not known.all():
        place = int(np.argmin(known))
        raise DataError(
            f"sample {place} has the role {role_values[place]!s}, which is neither 0 (chosen) nor 1 (rejected)",
            remedy="Write 0 for chosen and 1 for rejected samples",
        )
    return role_values.astype(np.int64, copy=False)


def pair_places(unit_ids: IntArray, roles: IntArray, counts: IntArray, sample_ids: IntArray) -> IntArray:
    """int64[P, 2]: the places of the chosen and the rejected one of N samples, for each of P units.

    All arguments are int64[N]; `counts` are numbers of loss-carrying tokens, and a unit without any is no pair. Raises DataError naming the
    samples of a unit whose roles are not one of each.
    """
    units, of_unit = np.unique(unit_ids, return_inverse=True)
    carrying = np.zeros(len(units), dtype=np.bool_)
    carrying[of_unit[counts > 0]] = True
    members = np.flatnonzero(carrying[of_unit])
    halves = np.zeros((len(units), 2), dtype=np.int64)
    np.add.at(halves, (of_unit[members], roles[members]), 1)
    wrong = carrying & (halves != 1).any(axis=1)
    if wrong.any():
        unit = int(np.argmax(wrong))
        members_of_unit = members[of_unit[members] == unit]
        described = ", ".join(
            f"{int(sample_ids[place])} ({'chosen' if roles[place] == CHOSEN else 'rejected'})" for place in members_of_unit[:4]
        )
        missing = " and ".join(name for name, role in ROLES.items() if halves[unit, role] == 0)
        cause = f"has no {missing} sample" if missing else "has a role twice"
        more = f" and {len(members_of_unit) - 4} more" if len(members_of_unit) > 4 else ""
        raise DataError(f"unit {int(units[unit])} {cause}, only the samples {described}{more}", remedy=_REMEDY)
    places = np.zeros((len(units), 2), dtype=np.int64)
    places[of_unit[members], roles[members]] = members
    return places[carrying]
