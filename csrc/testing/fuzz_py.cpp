// Runs fuzz targets: cases from a corpus and changed ones, for some seconds.
#include <fcntl.h>
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <random>

#include "base/error.hpp"
#include "base/fd.hpp"
#include "bindings/rooms.hpp"
#include "testing/fuzz.hpp"
#include "testing/module.hpp"

namespace py = pybind11;

namespace hdpcomm::testing {
namespace {

constexpr size_t kLongest = 512;

using Target = std::set<std::string> (*)(std::span<const uint8_t>);

Target targetOf(const std::string& name) {
  if (name == "frames") return fuzzFrames;
  if (name == "slots") return fuzzSlots;
  if (name == "texts") return fuzzTexts;
  throwInvalidUsage("there is no fuzz target '" + name + "'; give frames, slots or texts");
}

// The case that runs, in a file that is there when it has ended the process.
class Running {
 public:
  explicit Running(const std::string& path) {
    const Fd fd(HDP_SYS(::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)));
    HDP_SYS(::ftruncate(fd.get(), sizeof(uint64_t) + kLongest));
    void* memory = ::mmap(nullptr, sizeof(uint64_t) + kLongest, PROT_READ | PROT_WRITE, MAP_SHARED,
                          fd.get(), 0);
    if (memory == MAP_FAILED) throwInvalidUsage("cannot map " + path);
    memory_ = Mapping(memory, sizeof(uint64_t) + kLongest);
  }
  void set(const FuzzInput& input) {
    const uint64_t size = input.size();
    std::memcpy(memory_.data(), &size, sizeof size);
    std::memcpy(memory_.data() + sizeof size, input.data(), size);
  }

 private:
  Mapping memory_;
};

FuzzInput changed(FuzzInput input, const std::vector<FuzzInput>& corpus, std::mt19937_64& random) {
  const auto below = [&](size_t limit) { return static_cast<size_t>(random() % limit); };
  for (size_t changes = 1 + below(4); changes > 0; --changes) {
    switch (below(5)) {
      case 0:
        if (!input.empty()) input[below(input.size())] = static_cast<uint8_t>(random());
        break;
      case 1:
        input.insert(input.begin() + static_cast<ptrdiff_t>(below(input.size() + 1)),
                     static_cast<uint8_t>(random()));
        break;
      case 2:
        if (!input.empty())
          input.erase(input.begin() + static_cast<ptrdiff_t>(below(input.size())));
        break;
      case 3:
        for (size_t more = 1 + below(16); more > 0; --more) {
          input.push_back(static_cast<uint8_t>(random()));
        }
        break;
      default: {
        const FuzzInput& other = corpus[below(corpus.size())];
        input.resize(below(input.size() + 1));
        const size_t from = below(other.size() + 1);
        input.insert(input.end(), other.begin() + static_cast<ptrdiff_t>(from), other.end());
      }
    }
  }
  if (input.size() > kLongest) input.resize(kLongest);
  return input;
}

// (cases, the corpus with those that showed something new). What a case shows is what became of its
// requests.
std::pair<uint64_t, std::vector<py::bytes>> fuzz(const std::string& name,
                                                 const std::vector<std::string>& given,
                                                 double seconds, uint64_t seed,
                                                 const std::string& running_file) {
  const Target target = targetOf(name);
  std::vector<FuzzInput> corpus;
  uint64_t cases = 0;
  {
    const GilRelease release;
    std::mt19937_64 random(seed);
    Running running(running_file);
    std::set<std::string> seen;
    const auto run = [&](FuzzInput input) {
      running.set(input);
      bool fresh = false;
      for (const std::string& each : target(input)) fresh |= seen.insert(each).second;
      ++cases;
      if (fresh) corpus.push_back(std::move(input));
    };
    for (const std::string& each : given) {
      FuzzInput input(each.begin(), each.end());
      input.resize(std::min(input.size(), kLongest));
      run(std::move(input));
    }
    if (corpus.empty()) corpus.push_back({0});
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (std::chrono::steady_clock::now() < until) {
      run(changed(corpus[random() % corpus.size()], corpus, random));
    }
  }
  std::vector<py::bytes> found;
  for (const FuzzInput& each : corpus) {
    found.emplace_back(reinterpret_cast<const char*>(each.data()), each.size());
  }
  return {cases, found};
}

}  // namespace

void bindFuzz(py::module_& module) {
  module.def(
      "fuzz",
      [](const std::string& target, const std::vector<py::bytes>& corpus, double seconds,
         uint64_t seed, const std::string& running) {
        const std::vector<std::string> inputs(corpus.begin(), corpus.end());
        return fuzz(target, inputs, seconds, seed, running);
      },
      py::arg("target"), py::arg("corpus"), py::kw_only(), py::arg("seconds"), py::arg("seed"),
      py::arg("running"));
}

}  // namespace hdpcomm::testing
