// Requests for schedules, with the integers of Python.
#pragma once

#include "collective/schedule.hpp"

namespace hdpcomm {

inline ScheduleRequest requestOf(int op, int algorithm, int group_size, int rank, size_t count,
                                 size_t element_bytes, int root, bool average = false) {
  ScheduleRequest request;
  request.op = static_cast<OpCode>(op);
  request.algorithm = static_cast<Algorithm>(algorithm);
  request.group_size = group_size;
  request.rank = rank;
  request.count = count;
  request.element_bytes = element_bytes;
  request.root = root;
  request.average = average;
  return request;
}

}  // namespace hdpcomm
