// The settings of the environment, and their table.
#include <pybind11/stl.h>

#include "base/settings.hpp"
#include "bindings/rooms.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

// Why the value in force is refused; none where it is not.
std::optional<std::string> errorOf(const Setting& setting) {
  Settings ignored{};
  try {
    setting.parse(setting.text(), ignored);
  } catch (const Error& error) {
    return error.what();
  }
  return std::nullopt;
}

}  // namespace

void bindSettings(py::module_& module) {
  py::class_<Settings> settings(module, "Settings");
  for (const Setting& setting : settingsTable()) {
    std::visit(
        [&](auto member) {
          settings.def_property_readonly(
              setting.field, [member](const Settings& from) { return from.*member; },
              (std::string(setting.variable) + ": " + setting.meaning).c_str());
        },
        setting.member);
  }
  module.def("settings", &Settings::read);
  py::class_<Setting>(module, "Setting")
      .def_readonly("variable", &Setting::variable)
      .def_readonly("field", &Setting::field)
      .def_readonly("default", &Setting::fallback)
      .def_readonly("meaning", &Setting::meaning)
      .def_readonly("hidden", &Setting::hidden)
      .def_readonly("fixed", &Setting::fixed)
      .def_property_readonly("range", &Setting::range)
      .def_property_readonly("value", &Setting::text)
      .def_property_readonly("error", &errorOf);
  module.def("settings_table", [] {
    const auto table = settingsTable();
    return std::vector<Setting>(table.begin(), table.end());
  });
}

}  // namespace hdpcomm
