-- Chooses a pair: one worker computes the prompt, and another one the answer. The twin of this file in Python is
-- `kvatlas/reservations/pair_choice.py`.
--
-- pair_layout: { number of offers that compute only prompts, number of offers after them that compute only answers (all others
--   compute both), { group of each of the first }, { { us to move the KV from each group (below 0: it can't be moved)... } for
--   each of the second } }. Groups are numbered from 0.

-- scores, levels: one for each offer (see check_limits in _evaluation.lua). The levels of a pair add up and matter more than
-- costs; ties go to a worker that does both. Returns the number of the offer that computes only the prompt (0: none), and of
-- the one that computes the answer.
local function choose_pair(pair_layout, scores, levels)
  local prefills, decodes, groups, transfers = unpack(pair_layout)
  local prefill, chosen, lowest, least = 0, 1, math.huge, math.huge
  for i = prefills + decodes + 1, #scores do
    if levels[i] < lowest or (levels[i] == lowest and scores[i] < least) then
      chosen, lowest, least = i, levels[i], scores[i]
    end
  end
  local cheapest = {}
  for i = 1, prefills do
    local group = groups[i] + 1
    local best = cheapest[group]
    if not best or levels[i] < levels[best] or (levels[i] == levels[best] and scores[i] < scores[best]) then
      cheapest[group] = i
    end
  end
  for n = 1, decodes do
    local i = prefills + n
    for group, transfer_us in ipairs(transfers[n]) do
      local best = cheapest[group]
      if best and transfer_us >= 0 then
        local at, score = levels[best] + levels[i], scores[best] + (scores[i] + transfer_us)
        if at < lowest or (at == lowest and score < least) then
          prefill, chosen, lowest, least = best, i, at, score
        end
      end
    end
  end
  return prefill, chosen
end
