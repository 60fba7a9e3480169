#include "bindings/planner_table_py.hpp"

#include <charconv>
#include <memory>
#include <optional>
#include <string>

#include "base/error.hpp"
#include "bindings/rooms.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

// A numpy array over the memory of a vector, which it owns from then on.
template <typename T>
py::array owned(std::vector<T>&& values) {
  auto held = std::make_unique<std::vector<T>>(std::move(values));
  const auto size = static_cast<py::ssize_t>(held->size());
  const T* const data = held->data();
  const py::capsule owner(held.get(),
                          [](void* vector) { delete static_cast<std::vector<T>*>(vector); });
  held.release();
  return py::array_t<T>(size, data, owner);
}

template <typename T>
std::span<const T> column(const py::tuple& arrays, size_t place) {
  const py::object array = arrays[place];
  if (!py::isinstance<py::array_t<T, py::array::c_style>>(array)) {
    throwInvalidUsage("column " + std::to_string(place) + " of a plan's table is " +
                      std::string(py::repr(array)).substr(0, 80) +
                      ", expected a contiguous array of " +
                      std::string(py::str(py::dtype::of<T>())));
  }
  const auto values = py::cast<py::array_t<T, py::array::c_style>>(array);
  if (values.ndim() != 1) throwInvalidUsage("a column of a plan's table has no single dimension");
  return {values.data(), static_cast<size_t>(values.size())};
}

template <typename T>
std::span<const T> part(std::span<const T> values, std::span<const int64_t> bounds, size_t row) {
  const int64_t first = bounds[row];
  const int64_t last = bounds[row + 1];
  if (first < 0 || last < first || static_cast<uint64_t>(last) > values.size()) {
    throwInvalidUsage("row " + std::to_string(row) + " of a plan's table lies at " +
                      std::to_string(first) + " to " + std::to_string(last) + " of " +
                      std::to_string(values.size()) + " entries: the table is damaged");
  }
  return values.subspan(static_cast<size_t>(first), static_cast<size_t>(last - first));
}

// The collector need not look at objects that lie in no circle: a million of them would take it
// most of a second, again and again.
void untrack(const py::object& object) {
  if (PyObject_GC_IsTracked(object.ptr()) != 0) PyObject_GC_UnTrack(object.ptr());
}

// Makes objects of a frozen, slotted dataclass: fills the slots without the Python-level __init__,
// which would take most of the time.
class SlotFiller {
 public:
  SlotFiller(const py::object& cls, std::initializer_list<const char*> names)
      : type_(reinterpret_cast<PyTypeObject*>(cls.ptr())) {
    for (const char* name : names) names_.push_back(py::str(name));
  }

  template <typename... Values>
  py::object make(const Values&... values) const {
    auto object = py::reinterpret_steal<py::object>(type_->tp_alloc(type_, 0));
    if (!object) throw py::error_already_set();
    size_t field = 0;
    (set(object, field++, values), ...);
    untrack(object);
    return object;
  }

 private:
  void set(const py::object& object, size_t field, const py::object& value) const {
    if (PyObject_GenericSetAttr(object.ptr(), names_[field].ptr(), value.ptr()) != 0) {
      throw py::error_already_set();
    }
  }

  PyTypeObject* type_;
  std::vector<py::str> names_;
};

// Keeps Python's garbage collector off while many objects are made, none of which is garbage.
class CollectorPause {
 public:
  CollectorPause() : was_on_(PyGC_Disable() == 1) {}
  ~CollectorPause() {
    if (was_on_) PyGC_Enable();
  }
  CollectorPause(const CollectorPause&) = delete;
  CollectorPause& operator=(const CollectorPause&) = delete;

 private:
  bool was_on_;
};

// Objects of ranks, shared: a rank appears in many groups.
class RankObjects {
 public:
  py::object get(int32_t rank) {
    if (rank < 0 || rank >= kMostShared) return py::int_(rank);
    const auto place = static_cast<size_t>(rank);
    if (made_.size() <= place) made_.resize(place + 1);
    if (!made_[place]) made_[place] = py::int_(rank);
    return made_[place];
  }

 private:
  static constexpr int32_t kMostShared = 1 << 20;
  std::vector<py::object> made_;
};

// The micro-batches of rows `first` to `last - 1`.
py::tuple makeBatches(const py::tuple& arrays, size_t first, size_t last,
                      const py::object& batch_class, const py::object& sequence_class) {
  const TableView table(arrays);
  if (last > table.size() || first > last) {
    throwInvalidUsage("rows " + std::to_string(first) + " to " + std::to_string(last) +
                      " of a plan's table were asked for, it has " + std::to_string(table.size()));
  }
  const CollectorPause pause;
  const SlotFiller make_sequence(sequence_class, {"id", "length"});
  const SlotFiller make_batch(batch_class,
                              {"index", "ranks", "sequences", "offload_ratio", "predicted_s"});
  RankObjects rank_objects;
  py::tuple batches(last - first);
  for (size_t row = first; row < last; ++row) {
    const auto ranks = table.ranks(row);
    py::tuple group(ranks.size());
    for (size_t k = 0; k < ranks.size(); ++k) group[k] = rank_objects.get(ranks[k]);
    const auto ids = table.ids(row);
    const auto lengths = table.lengths(row);
    py::tuple sequences(ids.size());
    for (size_t k = 0; k < ids.size(); ++k) {
      sequences[k] = make_sequence.make(py::int_(ids[k]), py::int_(lengths[k]));
    }
    untrack(group);
    untrack(sequences);
    batches[row - first] =
        make_batch.make(py::int_(table.index(row)), group, sequences,
                        py::float_(table.offloadRatio(row)), py::float_(table.predictedS(row)));
  }
  return batches;
}

// The slices of a plan, from PlanColumns::slices.
py::tuple makeFragments(const py::array_t<int64_t, py::array::c_style>& slices,
                        const py::object& fragment_class) {
  const CollectorPause pause;
  const SlotFiller make_fragment(fragment_class, {"sequence", "start", "stop"});
  py::tuple fragments(static_cast<size_t>(slices.size()) / 3);
  const int64_t* numbers = slices.data();
  for (size_t k = 0; k < fragments.size(); ++k, numbers += 3) {
    fragments[k] =
        make_fragment.make(py::int_(numbers[0]), py::int_(numbers[1]), py::int_(numbers[2]));
  }
  return fragments;
}

void append(std::string& text, int64_t number) {
  char digits[24];
  text.append(digits, std::to_chars(digits, digits + sizeof(digits), number).ptr);
}

// A number as Python's repr() writes it.
void appendRepr(std::string& text, double number) {
  const std::unique_ptr<char, decltype(&PyMem_Free)> written(
      PyOS_double_to_string(number, 'r', 0, Py_DTSF_ADD_DOT_0, nullptr), &PyMem_Free);
  if (!written) throw py::error_already_set();
  text += written.get();
}

// What StepPlan.hash is of, a line for each row: the index, the ranks as a Python tuple, the
// sequences as a list of tuples, and the offload ratio.
py::bytes hashedText(const py::tuple& arrays) {
  const TableView table(arrays);
  std::string text;
  for (size_t row = 0; row < table.size(); ++row) {
    append(text, table.index(row));
    text += ";(";
    const auto ranks = table.ranks(row);
    for (size_t k = 0; k < ranks.size(); ++k) {
      if (k > 0) text += ", ";
      append(text, ranks[k]);
    }
    text += ranks.size() == 1 ? ",);[" : ");[";
    const auto ids = table.ids(row);
    const auto lengths = table.lengths(row);
    for (size_t k = 0; k < ids.size(); ++k) {
      text += k > 0 ? ", (" : "(";
      append(text, ids[k]);
      text += ", ";
      append(text, lengths[k]);
      text += ')';
    }
    text += "];";
    appendRepr(text, table.offloadRatio(row));
    text += '\n';
  }
  return text;
}

}  // namespace

PlanColumns::PlanColumns(const planner::Plan& plan, const std::vector<int64_t>& all_lengths,
                         const std::vector<int64_t>& all_ids, int64_t next_id) {
  const size_t rows = plan.micro_batches.size();
  for (auto* column : {&index, &rank_bounds, &sequence_bounds}) column->reserve(rows + 1);
  offload_ratio.reserve(rows);
  predicted_s.reserve(rows);
  rank_bounds.push_back(0);
  sequence_bounds.push_back(0);
  for (const planner::MicroBatch& batch : plan.micro_batches) {
    rank_bounds.push_back(rank_bounds.back() + static_cast<int64_t>(batch.ranks.size()));
    sequence_bounds.push_back(sequence_bounds.back() +
                              static_cast<int64_t>(batch.sequences.size()));
  }
  ranks.reserve(static_cast<size_t>(rank_bounds.back()));
  ids.reserve(static_cast<size_t>(sequence_bounds.back()));
  lengths.reserve(static_cast<size_t>(sequence_bounds.back()));
  for (const planner::MicroBatch& batch : plan.micro_batches) {
    index.push_back(static_cast<int64_t>(index.size()));
    ranks.insert(ranks.end(), batch.ranks.begin(), batch.ranks.end());
    for (const int32_t place : batch.sequences) {
      ids.push_back(all_ids.empty() ? place : all_ids.at(static_cast<size_t>(place)));
      lengths.push_back(all_lengths[static_cast<size_t>(place)]);
    }
    if (batch.slice.some()) {
      slices.insert(slices.end(), {ids.back(), batch.slice.first, batch.slice.end});
      ids.back() = next_id++;
      lengths.back() = batch.slice.end - batch.slice.first;
    }
    offload_ratio.push_back(batch.offload);
    predicted_s.push_back(batch.predicted_s);
  }
}

py::tuple PlanColumns::toTuple() && {
  return py::make_tuple(
      owned(std::move(index)), owned(std::move(rank_bounds)), owned(std::move(ranks)),
      owned(std::move(sequence_bounds)), owned(std::move(ids)), owned(std::move(lengths)),
      owned(std::move(offload_ratio)), owned(std::move(predicted_s)), owned(std::move(slices)));
}

TableView::TableView(const py::tuple& arrays) : owner_(arrays) {
  constexpr size_t kColumns = 8;
  if (arrays.size() != kColumns) {
    throwInvalidUsage("a plan's table has " + std::to_string(arrays.size()) +
                      " columns, expected " + std::to_string(kColumns));
  }
  index_ = column<int64_t>(arrays, 0);
  rank_bounds_ = column<int64_t>(arrays, 1);
  ranks_ = column<int32_t>(arrays, 2);
  sequence_bounds_ = column<int64_t>(arrays, 3);
  ids_ = column<int64_t>(arrays, 4);
  lengths_ = column<int64_t>(arrays, 5);
  offload_ratio_ = column<double>(arrays, 6);
  predicted_s_ = column<double>(arrays, 7);
  const size_t rows = index_.size();
  if (rank_bounds_.size() != rows + 1 || sequence_bounds_.size() != rows + 1 ||
      offload_ratio_.size() != rows || predicted_s_.size() != rows ||
      ids_.size() != lengths_.size()) {
    throwInvalidUsage("the columns of a plan's table have lengths that do not belong together");
  }
}

std::span<const int32_t> TableView::ranks(size_t row) const {
  return part(ranks_, rank_bounds_, row);
}

std::span<const int64_t> TableView::ids(size_t row) const {
  return part(ids_, sequence_bounds_, row);
}

std::span<const int64_t> TableView::lengths(size_t row) const {
  return part(lengths_, sequence_bounds_, row);
}

void bindPlannerTable(py::module_& module) {
  module.def("make_batches", &makeBatches, py::arg("table"), py::arg("first"), py::arg("last"),
             py::arg("batch_class"), py::arg("sequence_class"));
  module.def("make_fragments", &makeFragments, py::arg("slices"), py::arg("fragment_class"));
  module.def("hashed_text", &hashedText, py::arg("table"));
}

}  // namespace hdpcomm
