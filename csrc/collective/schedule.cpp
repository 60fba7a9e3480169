#include "collective/schedule.hpp"

#include <algorithm>
#include <array>
#include <map>

#include "base/error.hpp"
#include "collective/algorithms.hpp"
#include "collective/peer_reads.hpp"

namespace hdpcomm {
namespace {

using collective::Builder;

struct Entry {
  Algorithm algorithm;
  void (*build)(Builder&);
};

const std::vector<Entry>& entriesOf(OpCode op) {
  using namespace collective;
  static const std::map<OpCode, std::vector<Entry>> table = {
      {OpCode::kBarrier, {{Algorithm::kDissemination, disseminationBarrier}}},
      {OpCode::kAllGather,
       {{Algorithm::kRing, ringAllGather},
        {Algorithm::kDirect, directAllGather},
        {Algorithm::kBruck, bruckAllGather},
        {Algorithm::kHierarchical, hierarchicalAllGather}}},
      {OpCode::kReduceScatter,
       {{Algorithm::kRing, ringReduceScatter},
        {Algorithm::kDirect, directReduceScatter},
        {Algorithm::kRecursive, recursiveReduceScatter},
        {Algorithm::kHierarchical, hierarchicalReduceScatter}}},
      {OpCode::kAllReduce,
       {{Algorithm::kRing, ringAllReduce},
        {Algorithm::kDirect, directAllReduce},
        {Algorithm::kRecursive, recursiveAllReduce},
        {Algorithm::kRabenseifner, rabenseifnerAllReduce},
        {Algorithm::kHierarchical, hierarchicalAllReduce}}},
      {OpCode::kBroadcast,
       {{Algorithm::kBinomial, binomialBroadcast},
        {Algorithm::kDirect, directBroadcast},
        {Algorithm::kChain, chainBroadcast},
        {Algorithm::kHierarchical, hierarchicalBroadcast}}},
      {OpCode::kReduce,
       {{Algorithm::kBinomial, binomialReduce},
        {Algorithm::kDirect, directReduce},
        {Algorithm::kChain, chainReduce},
        {Algorithm::kHierarchical, hierarchicalReduce}}},
      {OpCode::kGather,
       {{Algorithm::kDirect, directGather}, {Algorithm::kBinomial, binomialGather}}},
      {OpCode::kScatter,
       {{Algorithm::kDirect, directScatter}, {Algorithm::kBinomial, binomialScatter}}},
      {OpCode::kAllToAll,
       {{Algorithm::kDirect, directAllToAll}, {Algorithm::kBruck, bruckAllToAll}}},
  };
  static const std::vector<Entry> none;
  const auto found = table.find(op);
  return found == table.end() ? none : found->second;
}

// In a rooted operation a rank may end without a message from a peer to which it sent. Its last
// message to such a peer asks for confirmation, so that both sides notice if the peer called
// something else. (In the other operations every rank receives something from all members,
// directly or through others.)
void confirmUnheard(Schedule& schedule, bool ragged) {
  if (schedule.op != OpCode::kBroadcast && schedule.op != OpCode::kReduce &&
      schedule.op != OpCode::kGather && schedule.op != OpCode::kScatter && !ragged) {
    return;
  }
  std::vector<bool> heard(static_cast<size_t>(schedule.group_size));
  for (const Step& step : schedule.steps) {
    for (const Recv& recv : step.recvs) heard[static_cast<size_t>(recv.peer)] = !ragged;
  }
  for (auto step = schedule.steps.rbegin(); step != schedule.steps.rend(); ++step) {
    for (auto send = step->sends.rbegin(); send != step->sends.rend(); ++send) {
      if (heard[static_cast<size_t>(send->peer)]) continue;
      heard[static_cast<size_t>(send->peer)] = true;
      send->confirm = true;
    }
  }
}

// An all-gather copies its own block to the output and sends it. Lets the sends read the input
// instead: receivers then do not fetch cache lines that this rank has just written, and the input
// may lie in memory that others map.
void sendOwnFromInput(Schedule& schedule, const Span& input, const Span& own) {
  for (Step& step : schedule.steps) {
    for (Send& send : step.sends) {
      if (send.from == own) send.from = input;
    }
  }
}

// Merges steps that contain only moves into the following step, and drops empty steps.
void compact(Schedule& schedule) {
  std::vector<Step> steps;
  for (Step& step : schedule.steps) {
    const bool previous_only_moves =
        !steps.empty() && steps.back().sends.empty() && steps.back().recvs.empty();
    if (previous_only_moves) {
      Step& target = steps.back();
      target.moves.insert(target.moves.end(), step.moves.begin(), step.moves.end());
      target.sends = std::move(step.sends);
      target.recvs = std::move(step.recvs);
    } else if (!step.moves.empty() || !step.sends.empty() || !step.recvs.empty()) {
      steps.push_back(std::move(step));
    }
  }
  schedule.steps = std::move(steps);
}

}  // namespace

namespace collective {

Builder::Builder(const ScheduleRequest& request) : request(request) {
  schedule.op = request.op;
  schedule.group_size = request.group_size;
  schedule.rank = request.rank;
}

Span Builder::part(Buffer buffer, int i) const {
  const size_t n = request.count;
  const auto boundary = [&](size_t index) {
    return n / p() * index + std::min<size_t>(index, n % p());
  };
  const size_t begin = boundary(static_cast<size_t>(i));
  return {buffer, bytes(begin), bytes(boundary(static_cast<size_t>(i) + 1) - begin)};
}

}  // namespace collective

Algorithm parseAlgorithm(const std::string& name) {
  std::string known;
  for (int i = 0; i < kNumAlgorithms; ++i) {
    const auto algorithm = static_cast<Algorithm>(i);
    if (name == algorithmName(algorithm)) return algorithm;
    known += std::string(i == 0 ? "" : ", ") + algorithmName(algorithm);
  }
  throwInvalidUsage("algorithm '" + name + "' is unknown; give one of: " + known);
}

const std::vector<Algorithm>& algorithmsOf(OpCode op) {
  static const auto table = [] {
    std::array<std::vector<Algorithm>, 16> result;
    for (size_t i = 0; i < result.size(); ++i) {
      for (const Entry& entry : entriesOf(static_cast<OpCode>(i)))
        result[i].push_back(entry.algorithm);
    }
    return result;
  }();
  return table.at(static_cast<size_t>(op));
}

Schedule makeSchedule(const ScheduleRequest& request) {
  const auto& entries = entriesOf(request.op);
  const auto found = std::find_if(entries.begin(), entries.end(), [&](const Entry& entry) {
    return request.algorithm == Algorithm::kAuto || entry.algorithm == request.algorithm;
  });
  if (found == entries.end()) {
    std::string known;
    for (const Entry& entry : entries)
      known += std::string(known.empty() ? "" : ", ") + algorithmName(entry.algorithm);
    throwInvalidUsage(std::string(opName(request.op)) + " has no algorithm '" +
                      algorithmName(request.algorithm) + "'" +
                      (readsPeers(request.algorithm)
                           ? " of messages (its kernels read the peers' memory: it is for device "
                             "tensors of the transports cuda and sim)"
                           : "") +
                      "; it has: " + known);
  }
  Builder builder(request);
  builder.schedule.algorithm = found->algorithm;
  found->build(builder);
  if (request.op == OpCode::kAllGather) {
    sendOwnFromInput(builder.schedule, builder.whole(Buffer::kIn),
                     builder.block(Buffer::kOut, request.rank));
  }
  compact(builder.schedule);
  confirmUnheard(builder.schedule, !request.in_counts.empty());
  return std::move(builder.schedule);
}

}  // namespace hdpcomm
