#include "planner/policies/policies.hpp"

#include "base/error.hpp"
#include "planner/flat/balanced.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/pipeline/pipeline.hpp"

namespace hdpcomm::planner {

Plan planPolicy(const Problem& problem, const std::string& policy, const PolicyOptions& options,
                double lower_bound) {
  const auto named = [&](Plan plan) {
    plan.made_by = policy;
    return plan;
  };
  if (policy == "static") return named(planStatic(problem, options));
  if (policy == "naive") return named(planNaive(problem));
  if (policy == "pow2") return named(planPow2(problem));
  if (policy == "balanced" || policy == "pipeline") {
    const auto plan = problem.cost().cluster().pipeline > 1 ? planPipeline : planBalanced;
    return plan(problem, options, lower_bound);
  }
  throwInvalidUsage("policy is '" + policy +
                    "', expected static, naive, balanced, pipeline or pow2");
}

}  // namespace hdpcomm::planner
