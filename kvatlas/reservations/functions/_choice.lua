-- The choice among all offers to named workers and to look-alikes.

-- Finds the first source that is free for the offer that computes the prompt, otherwise the one that becomes free first.
local function find_source(state)
  local ask, number = state.ask, state.prefill > 0 and state.prefill or state.chosen
  local row = state.at[number] / OFFER_FIELDS + 1
  if state.rows[number] == ask.look_alikes then
    row = row + #ask.offers / OFFER_FIELDS
  end
  for _, fetch in ipairs(ask.fetches) do
    if fetch[1] == row then
      local first = math.huge
      for i = 3, math.min(#fetch, MOST_SOURCES + 2) do
        local source = ask.sources[fetch[i]]
        local busy_us = tonumber(redis.call('HGET', state.keys[SOURCES], source)) or 0
        local free_us = math.max(state.now, is_finite(busy_us) and busy_us or 0)
        if free_us < first then
          first, state.source = free_us, source
        end
      end
      state.fetched_us = first + fetch[2]
      return
    end
  end
end

-- Returns the predictions for the workers that the answer is about, flat.
local function list_predictions(state, offered, members)
  local predictions = {}
  local function add(worker)
    local one = state.best[worker]
    if one then
      predictions[#predictions + 1], predictions[#predictions + 2] = worker, one.tokens
      predictions[#predictions + 1] = one.ready_us
    end
  end
  for _, worker in ipairs(next(state.best) and offered or {}) do
    add(worker)
  end
  for i = 1, next(state.best) and #members or 0, 4 do
    add(members[i])
  end
  return predictions
end

-- Returns
-- - the answer, an array: number of the cheapest offer (with a pair layout: of the one that computes the answer), number of the
--   offer that computes the prompt alone (0: none), now, the mean load (empty: no load is unknown), tokens in flight,
--   { worker with a prediction, its tokens, us at which they are ready... } of those that follow, each offer's packed worker,
--   { worker, number of its row of look-alikes, packed worker, blocks that were looked up... } of look-alikes that were read;
--   their numbers follow the offers', source of the worker that computes the prompt ('': it fetches nothing). From this the
--   client can compute how each offer was evaluated.
-- - the state that a booking needs: `rows`, `at`, `workers` and `backlog_us` by number of the offer, and if it uses
--   a prediction `used` (its tokens) and `wait_us` (us to wait for them); `matches` by number of the chain; with a source
--   `source`, and `fetched_us`, at which its fetches will have ended
-- Returns nil if there are too few look-alikes; { NOT_IN_HBM } or { TOO_MANY } if the client has to look them up
-- (_lookup.lua).
local function evaluate(keys, ask, now)
  local state = {
    keys = keys, ask = ask, now = now, fresh = now - STALE_US, count = 0, rows = {}, at = {}, workers = {}, records = {},
    backlog_us = {}, used = {}, wait_us = {}, matches = {}, best = {}, in_flight = 0,
    chosen = 0, prefill = 0, least = math.huge, lowest = math.huge, ring = math.huge,
    named = {}, kind_of = {}, packed_of = {}, row_of = {}, group_of_row = {}, extras = {}, overdue = {}, looked_up = {},
  }
  local offers, names = ask.offers, {}
  for at = 0, #offers - 1, OFFER_FIELDS do
    local worker = offers[at + OFFER_WORKER]
    names[#names + 1], state.named[worker], state.kind_of[worker] = worker, true, offers[at + KIND] * KIND_FIELDS
  end
  state.offered = records_of(keys, names)
  for i, worker in ipairs(names) do
    state.packed_of[worker] = state.offered[i]
  end
  if ask.lookup and ask.lookup.named[1] then
    find_named(state)
  elseif ask.look_alikes[1] and not find_look_alikes(state) then
    return nil
  end
  find_predictions(state)
  weigh_offers(state)
  if ask.lookup then
    local why_not = look_up(state)
    if why_not then
      return { why_not }
    end
  elseif ask.look_alikes[1] then
    weigh_look_alikes(state)
  end
  if state.chosen == 0 then
    return nil
  end
  local chosen, members = list_members(state)
  find_source(state)
  return {
    chosen, state.prefill, now, state.mean or {}, state.in_flight, list_predictions(state, names, members), state.offered,
    members, state.source or '',
  }, state
end
