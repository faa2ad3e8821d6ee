"""What parts cost, from what sums of them took."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def fitted(amounts: Floats, took: Floats) -> Floats:
    """Costs [num_parts] for which `amounts @ costs` is nearest to `took`, by least squares of relative errors.

    `amounts` is [num_samples, num_parts], `took` [num_samples] and above 0. No cost is below 0: the part that would be
    lowest is left out, one after another.
    """
    parts = list(range(amounts.shape[1]))
    costs = np.zeros(amounts.shape[1])
    while parts:
        found, *_ = np.linalg.lstsq(amounts[:, parts] / took[:, None], np.ones(len(took)))
        if (found >= 0).all():
            costs[parts] = found
            break
        del parts[int(found.argmin())]
    return costs
