"""The buckets of relative positions, of which each has a learned bias."""

import math

import numpy as np


def relative_position_bucket(
    distance: np.ndarray, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
    """Return the bucket of every relative position, as `_relative_position_bucket` of Mesh TensorFlow in float32.

    Half of the buckets hold one distance each; the others grow exponentially, and the last holds everything from
    `max_distance` on. Unless `bidirectional`, all future keys are in bucket 0.

    Args:
      distance: Position of the key minus that of the query, int of any shape.
      bidirectional: Whether future keys have their own half of the buckets.
      num_buckets: Number of buckets.
      max_distance: Distance from which the last bucket is used.

    Returns:
      int, of the shape of `distance`.

    Example:
      >>> distance = np.array([-200, -9, -1, 0, 1])
      >>> relative_position_bucket(distance, bidirectional=False, num_buckets=32, max_distance=128)
      array([31,  9,  1,  0,  0])
    """
    offset = np.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        offset, distance = np.where(distance > 0, num_buckets, 0), np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = num_buckets // 2
    powers = np.log(np.maximum(distance, exact).astype(np.float32) / exact) / math.log(max_distance / exact)
    wide = np.minimum(exact + (powers * (num_buckets - exact)).astype(distance.dtype), num_buckets - 1)
    return offset + np.where(distance < exact, distance, wide)
