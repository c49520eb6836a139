-- Evaluates offers: finds the worker on offer that is cheapest now. The twin of this file in Python is
-- `kvatlas/reservations/evaluation.py`.
--
-- ask, cmsgpack: { factor for computing again, { { tokens of a step, packed step hashes }... }, kinds, offers, limits (0: check
--   none), pair layout (0: choose one offer; see _pair_choice.lua), look-alikes, { workers that get no offer as
--   look-alikes... }, least number of look-alikes, place on the ring, lookup (0: what look-alikes hold is part of the offers;
--   see _lookup.lua), sources, fetches }, packed by kvatlas/reservations/redis.py
-- Kinds, offers and look-alikes are rows of flat lists: hundreds of tables would take longer than everything else.
-- kind: number of its chain (0: none), most tokens that can be used, tokens of a hit that are lost, us for each queued token,
--   running request, KV token, tokens that a waiting request stands for, us for each prompt token, squared prompt token, hit,
--   us for which predictions are believed, their capacity in steps, price of each us by which a running request is
-- delayed.
-- offer: worker, number of its kind (from 0), steps it holds, cached tokens, cost without load, the part of that cost before
--   the first token. Ties go to the first offer.
-- look-alikes: the same, with a likeness instead of a worker.
-- sources: those of all fetches; fetches: { number of the row among offers and look-alikes, us of the transfer, numbers of
--   its equal sources... }...
-- limits: { us to the first token (0: no limit), us for all other tokens (0: none), factor for the us by which these are
--   missed, 1 if workers that miss them are filtered out, prompt tokens, rows of: request slots, KV tokens (0: unknown), us
--   for all tokens but the first without load; 1 if look-alikes have room; us for all tokens but the first for each row of
--   look-alikes }

local CHAIN, LIMIT, LOST, QUEUED_US, RUNNING_US, KV_US, WAITING_TOKENS = 1, 2, 3, 4, 5, 6, 7
local TOKEN_US, SQUARE_US, HIT_US, BELIEVED_US, CAPACITY, INTERFERENCE, KIND_FIELDS = 8, 9, 10, 11, 12, 13, 13
local OFFER_WORKER, KIND, HELD_STEPS, CACHED, BASE, WORK, OFFER_FIELDS = 1, 2, 3, 4, 5, 6, 6
local MOST_ASK, MOST_OFFERS, MOST_SKIPPED = 131072, 192, 256 -- bytes of an ask, its offers, and workers that get none
local MOST_CHAINS, MOST_STEPS = 16, 2048 -- chains of an ask, and steps in all of them
local MOST_LOOKED_UP_CHAINS, MOST_NAMED = 4, 64 -- of a lookup, see kvatlas/reservations/lookup.py
local MOST_LIKENESSES = 32 -- of an ask
local MOST_SOURCES = 16 -- of an offer
local MOST_MATCHED = 64 -- predictions that one ask reads; long ones count several times
local LEVEL_NO_ROOM = 2
local ROW_SLOTS, ROW_KV_TOKENS, ROW_DECODE_US, LIMIT_FIELDS = 1, 2, 3, 3

local function unpack_limits(limits)
  local ttft_us, decode_us, slo_factor, slo_filters, input_tokens, rows, look_alikes_have_room, of_look_alikes = unpack(limits)
  return {
    ttft_us = ttft_us, decode_us = decode_us, slo_factor = slo_factor, slo_filters = slo_filters == 1,
    input_tokens = input_tokens, rows = rows, look_alikes_have_room = look_alikes_have_room == 1,
    of_look_alikes = of_look_alikes,
  }
end

local function unpack_lookup(lookup)
  local blocks, active, workers, held, scope_id, chains, reuse, odd, home, home_us, listed = unpack(lookup)
  local rows, named, row_of = {}, {}, {}
  if #chains > MOST_LOOKED_UP_CHAINS or #listed > MOST_NAMED * 2 then
    error({ err = string.format('ERR ask of %d chains to look up for %d workers at most', MOST_LOOKED_UP_CHAINS, MOST_NAMED) })
  end
  for i = 1, #odd, 2 do
    rows[odd[i]] = (odd[i + 1] - 1) * OFFER_FIELDS
  end
  for i = 1, #listed, 2 do
    named[#named + 1], row_of[listed[i]] = listed[i], (listed[i + 1] - 1) * OFFER_FIELDS
  end
  return {
    blocks = blocks, active = active, workers = workers, held = held, scope_id = scope_id, chains = chains, reuse = reuse,
    odd = rows, home = home, home_us = home_us, named = named, row_of = row_of,
  }
end

-- Returns an ask with its fields by name, each chain as { step_tokens, hashes }; limits and pair_layout are nil if absent.
local function unpack_ask(packed)
  local again_factor, chains, kinds, offers, limits, pair_layout, look_alikes, skipped, least_members, ring, lookup, sources,
    fetches = unpack(cmsgpack.unpack(packed))
  local steps, rows = 0, (#offers + #look_alikes) / OFFER_FIELDS
  for i, chain in ipairs(chains) do
    steps = steps + #chain[2] / HASH_BYTES
    chains[i] = { step_tokens = chain[1], hashes = chain[2] }
  end
  if #chains > MOST_CHAINS or steps > MOST_STEPS or rows > MOST_OFFERS or #skipped > MOST_SKIPPED
    or #look_alikes > MOST_LIKENESSES * OFFER_FIELDS
  then
    error({ err = string.format('ERR ask of %d steps and %d offers at most', MOST_STEPS, MOST_OFFERS) })
  end
  return {
    again_factor = again_factor, chains = chains, kinds = kinds, offers = offers,
    limits = limits ~= 0 and unpack_limits(limits) or nil, pair_layout = pair_layout ~= 0 and pair_layout or nil,
    look_alikes = look_alikes, skipped = skipped, least_members = least_members, ring = ring, sources = sources,
    fetches = fetches,
    lookup = lookup ~= 0 and unpack_lookup(lookup) or nil,
  }
end

-- Returns how much it saves to hold this many tokens on workers of the kind whose row begins after `k`.
local function worth(kinds, k, tokens)
  local us = kinds[k + TOKEN_US] * tokens + kinds[k + SQUARE_US] * tokens * tokens
  return tokens > 0 and us - kinds[k + HIT_US] or us
end

-- Returns what a request with this much left to compute costs the running requests of a worker, which it delays.
local function interference(kinds, k, work_us, running)
  return kinds[k + INTERFERENCE] * math.max(0, work_us) * running
end

-- Returns the us by which an offer misses the SLO, and its level, which depends on what it would exceed (0: nothing that
-- counts, 1: chosen only if there is no 0, 2: only if there is no 1). `reported_kv` nil: the worker's load is unknown.
local function check_limits(limits, slots, kv_tokens, decode_us, ttft_us, load_us, running, queued, reported_kv, cached)
  local most_ttft_us, most_decode_us = limits.ttft_us, limits.decode_us
  local missed, level = 0, 0
  if most_ttft_us > 0 and ttft_us > most_ttft_us then
    missed = ttft_us - most_ttft_us
  end
  if most_decode_us > 0 and decode_us + load_us > most_decode_us then
    missed = missed + (decode_us + load_us - most_decode_us)
  end
  if missed > 0 and limits.slo_filters then
    level = 1
  end
  if reported_kv then
    if slots > 0 and running >= slots then
      level = LEVEL_NO_ROOM
    end
    -- requests that already wait there will need their KV first
    if kv_tokens > 0 and reported_kv + queued + (limits.input_tokens - cached) > kv_tokens then
      level = LEVEL_NO_ROOM
    end
  end
  return missed, level
end

-- Returns the packed records of workers, in the order of the workers.
local function records_of(keys, workers)
  local records = {}
  for first = 1, #workers, CHUNK do
    local found = redis.call('HMGET', keys[LOAD], unpack(workers, first, math.min(first + CHUNK - 1, #workers)))
    for i = 1, #found do
      local packed = found[i] or no_worker()
      check_length(packed)
      records[first + i - 1] = packed
    end
  end
  return records
end

-- Returns the mean of the known loads of all workers with offers and of all look-alikes: {queued tokens, running requests,
-- waiting requests, KV tokens}. It stands in for loads that are unknown.
local function mean_of(state)
  local known, sums = 0, { 0, 0, 0, 0 }
  local function add(sign, queued, running, waiting, kv)
    known = known + sign
    sums[1], sums[2] = sums[1] + sign * queued, sums[2] + sign * running
    sums[3], sums[4] = sums[3] + sign * waiting, sums[4] + sign * kv
  end
  -- a group's sums include all its members; this corrects them where the choice counts different ones
  local function correct(packed, counts)
    local sampled, _, queued, running, waiting, kv, _, _, _, _, _, _, group, believed = struct.unpack(WORKER, packed)
    local counted = believed == 1 and state.row_of[group] ~= nil
    counts = counts and sampled > state.fresh
    if counted ~= counts then
      add(counts and 1 or -1, queued, running, waiting, kv)
    end
  end
  for group in pairs(state.row_of) do
    local packed = redis.call('HGET', state.keys[GROUPS], 's' .. group)
    if packed then
      if #packed ~= SUMS_BYTES then
        damaged('sums of loads')
      end
      local members, queued, running, waiting, kv = struct.unpack(SUMS, packed)
      if not is_finite(members + queued + running + waiting + kv) then
        damaged('sums of loads')
      end
      known = known + members
      sums[1], sums[2], sums[3], sums[4] = sums[1] + queued, sums[2] + running, sums[3] + waiting, sums[4] + kv
    end
  end
  for _, packed in ipairs(state.offered) do
    correct(packed, true)
  end
  for _, packed in ipairs(state.looked_up) do
    correct(packed, true)
  end
  for _, packed in ipairs(records_of(state.keys, state.ask.skipped)) do
    correct(packed, false)
  end
  for _, worker in ipairs(state.overdue) do
    correct(state.packed_of[worker], false)
  end
  for i, sum in ipairs(sums) do
    sums[i] = known > 0 and math.ceil(sum / known) or 0
  end
  return sums
end

-- Returns the place in the ask's look-alikes after which the row of a worker begins; nil if it has none.
local function row_for(state, worker, packed)
  local group = group_in(packed)
  local lookup = state.ask.lookup
  local odd = lookup and lookup.odd[worker]
  return odd and state.group_of_row[odd] == group and odd or state.row_of[group]
end

-- Returns the place of the row with the kind of an offer to a worker; nil or false if it gets no offer.
local function kind_for(state, worker)
  local k = state.kind_of[worker]
  if k == nil and state.ask.look_alikes[1] and not state.named[worker] then
    local packed = state.packed_of[worker] or records_of(state.keys, { worker })[1]
    state.packed_of[worker] = packed
    local at = row_for(state, worker, packed)
    k = at and state.ask.look_alikes[at + KIND] * KIND_FIELDS or false
    state.kind_of[worker] = k
    if k then
      state.extras[#state.extras + 1] = worker
    end
  end
  return k
end

-- Reads the records of the look-alikes that these predictions are about.
local function read_predicted(state, matches)
  local workers, seen = {}, {}
  for _, match in ipairs(state.ask.look_alikes[1] and matches or {}) do
    local worker = match.prediction[P_WORKER]
    if not (seen[worker] or state.named[worker] or state.packed_of[worker]) then
      seen[worker], workers[#workers + 1] = true, worker
    end
  end
  for i, packed in ipairs(records_of(state.keys, workers)) do
    state.packed_of[workers[i]] = packed
  end
end

-- Finds each worker's best prediction, { tokens = those that it would use, ready_us }; the most tokens that any worker is
-- computing now; and the matches of each chain.
local function find_predictions(state)
  local keys, ask, best = state.keys, state.ask, state.best
  if redis.call('EXISTS', keys[ANCHORS]) == 0 then
    return
  end
  local kinds, left = ask.kinds, MOST_MATCHED
  for c, chain in ipairs(ask.chains) do
    local matches, found = {}
    found, left = matches_of(keys, chain.hashes, state.now, left)
    read_predicted(state, found)
    for _, match in ipairs(found) do
      local worker, ready_us = match.prediction[P_WORKER], match.prediction[P_READY_US]
      local k = kind_for(state, worker)
      local packed = k and state.packed_of[worker]
      if packed and number_in(packed, GENERATION) == match.prediction[P_GENERATION] then
        matches[#matches + 1] = match
        if kinds[k + CHAIN] == c then
          local tokens = math.max(0, math.min(match.steps * chain.step_tokens, kinds[k + LIMIT]) - kinds[k + LOST])
          local before = best[worker]
          if not before or tokens > before.tokens or (tokens == before.tokens and ready_us < before.ready_us) then
            best[worker] = { tokens = tokens, ready_us = ready_us }
          end
        end
      end
    end
    state.matches[c] = matches
  end
  for _, one in pairs(best) do
    if one.ready_us > state.now then
      state.in_flight = math.max(state.in_flight, one.tokens)
    end
  end
end

-- Evaluates the i-th offer, which is made to a worker: the row after `at` in `rows`. Returns its score and its level.
local function weigh(state, i, rows, at, worker, packed, slots, kv_tokens, decode_us)
  local ask, limits = state.ask, state.ask.limits
  state.rows[i], state.at[i], state.workers[i], state.records[i] = rows, at, worker, packed
  local kinds, k = ask.kinds, rows[at + KIND] * KIND_FIELDS
  local sampled, _, queued, running, waiting, reported_kv, more, more_running, more_kv = struct.unpack(LOADS, packed)
  if not is_finite(sampled + queued + running + waiting + reported_kv + more + more_running + more_kv) then
    damaged('load')
  end
  local known, kv = sampled > state.fresh, reported_kv
  if not known then
    state.mean = state.mean or mean_of(state)
    queued, running, waiting, kv = unpack(state.mean)
  end
  queued, running, kv = queued + more, running + more_running, kv + more_kv
  local backlog_us = kinds[k + QUEUED_US] * (queued + waiting * kinds[k + WAITING_TOKENS])
  local load_us = kinds[k + RUNNING_US] * running + kinds[k + KV_US] * kv
  local score, level = rows[at + BASE] + backlog_us + load_us, 0
  local cached, wait_us = rows[at + CACHED], 0
  local prediction = state.best[worker]
  if prediction and prediction.tokens > cached then
    local wait = math.max(0, prediction.ready_us - state.now - backlog_us)
    local other = score - (worth(kinds, k, prediction.tokens) - worth(kinds, k, cached)) + wait
    if other < score then
      score, cached, wait_us = other, prediction.tokens, wait
      state.used[i], state.wait_us[i] = cached, wait
    end
  end
  if state.in_flight > cached then
    score = score + ask.again_factor * (worth(kinds, k, state.in_flight) - worth(kinds, k, cached))
  end
  local work_us = rows[at + WORK] - (worth(kinds, k, cached) - worth(kinds, k, rows[at + CACHED]))
  score = score + interference(kinds, k, work_us, running)
  if limits then
    local missed
    missed, level = check_limits(
      limits, slots, kv_tokens, decode_us, work_us + backlog_us + wait_us, load_us, running, queued,
      known and reported_kv or nil, cached
    )
    score = score + limits.slo_factor * missed
  end
  state.backlog_us[i] = backlog_us
  return score, level
end

-- Chooses the i-th offer if it is the best one so far.
local function prefer(state, i, score, level, ring)
  local least, lowest = state.least, state.lowest
  if level < lowest or (level == lowest and (score < least or (score == least and ring < state.ring))) then
    state.chosen, state.least, state.lowest, state.ring = i, score, level, ring
  end
end

-- Weighs the offers that name their worker, beginning with the one that is cheapest without load. Once an offer costs less with
-- load than the next ones do without it, the latter need not be weighed unless they have a prediction. For pairs, all are
-- weighed.
local function weigh_offers(state)
  local ask, offers = state.ask, state.ask.offers
  local rows, scores, levels, order = ask.limits and ask.limits.rows, {}, {}, {}
  for i = 1, #state.offered do
    order[i] = i
  end
  if not ask.pair_layout then
    table.sort(order, function(a, b)
      local base_a, base_b = offers[(a - 1) * OFFER_FIELDS + BASE], offers[(b - 1) * OFFER_FIELDS + BASE]
      return base_a < base_b or (base_a == base_b and a < b)
    end)
  end
  for _, i in ipairs(order) do
    local at, l = (i - 1) * OFFER_FIELDS, (i - 1) * LIMIT_FIELDS
    local worker = offers[at + OFFER_WORKER]
    if ask.pair_layout or state.lowest > 0 or offers[at + BASE] <= state.least or state.best[worker] then
      local slots, kv_tokens, decode_us = 0, 0, 0
      if rows then
        slots, kv_tokens, decode_us = rows[l + ROW_SLOTS], rows[l + ROW_KV_TOKENS], rows[l + ROW_DECODE_US]
      end
      scores[i], levels[i] = weigh(state, i, offers, at, worker, state.offered[i], slots, kv_tokens, decode_us)
      if not ask.pair_layout then
        prefer(state, i, scores[i], levels[i], i - #order - 1)
      end
    elseif struct.unpack('>d', state.offered[i]) <= state.fresh then
      state.mean = state.mean or mean_of(state) -- needed to explain what this offer costs
    end
  end
  if ask.pair_layout then
    state.prefill, state.chosen = choose_pair(ask.pair_layout, scores, levels)
    state.lowest = math.max(levels[state.chosen], levels[state.prefill] or 0)
  end
  state.count = #state.offered
end
