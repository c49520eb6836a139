-- Evaluating offers: which of the offered workers is cheapest now. The Python twin of this file is
-- `kvatlas/reservations/evaluation.py`.
--
-- ask, cmsgpack: { stale us, factor of computing again, { { tokens a step, packed step hashes }... }, kinds, offers, limits
--   (0 or absent: none are checked), pair layout (absent: one offer is chosen; see _pair_choice.lua) }, packed by
--   kvatlas/reservations/redis.py
-- Kinds and offers are rows of flat lists: a table for each of hundreds takes longer than all the rest.
-- kind: number of its chain (0: none), most tokens that can be used, tokens lost of a hit, us a queued token, us a running
--   request, us a KV token, tokens that a waiting request stands for, us a prompt token, us a squared prompt token, us a hit,
--   us for which predictions are believed, their capacity in steps.
-- offer: worker, number of its kind (from 0), steps it holds, cached tokens, cost without load, the part of it before the first
--   token. Ties go to the first offer.
-- limits: { us to the first token (0: no limit), us for all others (0: none), factor of the us by which they are missed, 1 if
--   missing them filters, prompt tokens, rows of: request slots, KV tokens (0: unknown), us for all tokens but the first
--   without load }

local CHAIN, LIMIT, LOST, QUEUED_US, RUNNING_US, KV_US, WAITING_TOKENS = 1, 2, 3, 4, 5, 6, 7
local TOKEN_US, SQUARE_US, HIT_US, BELIEVED_US, CAPACITY, KIND_FIELDS = 8, 9, 10, 11, 12, 12
local OFFER_WORKER, KIND, HELD_STEPS, CACHED, BASE, WORK, OFFER_FIELDS = 1, 2, 3, 4, 5, 6, 6
local SLOTS, KV_TOKENS, DECODE_US, LIMIT_FIELDS = 1, 2, 3, 3

local function unpack_limits(limits)
  local ttft_us, decode_us, slo_factor, slo_filters, input_tokens, rows = unpack(limits)
  return {
    ttft_us = ttft_us, decode_us = decode_us, slo_factor = slo_factor, slo_filters = slo_filters == 1,
    input_tokens = input_tokens, rows = rows,
  }
end

-- Returns an ask by names, each chain as { step_tokens, hashes }; limits and pair_layout nil if absent.
local function unpack_ask(packed)
  local ask = cmsgpack.unpack(packed)
  local stale_us, again_factor, chains, kinds, offers, limits, pair_layout = unpack(ask, 1, 7)
  for i, chain in ipairs(chains) do
    chains[i] = { step_tokens = chain[1], hashes = chain[2] }
  end
  return {
    stale_us = stale_us, again_factor = again_factor, chains = chains, kinds = kinds, offers = offers,
    limits = limits and limits ~= 0 and unpack_limits(limits) or nil, pair_layout = pair_layout,
  }
end

-- Returns what holding so many tokens saves on workers of the kind whose row begins behind `k`.
local function worth(kinds, k, tokens)
  local us = kinds[k + TOKEN_US] * tokens + kinds[k + SQUARE_US] * tokens * tokens
  return tokens > 0 and us - kinds[k + HIT_US] or us
end

-- Returns how many leading steps two packed chains share: equal hashes mean that all before them are equal too.
local function shared(chain, offset, hashes)
  local low, high = 1, math.min(#chain - offset, #hashes) / HASH_BYTES
  while low < high do
    local middle = math.ceil((low + high) / 2)
    local last = middle * HASH_BYTES
    if string.sub(chain, offset + last - 7, offset + last) == string.sub(hashes, last - 7, last) then
      low = middle
    else
      high = middle - 1
    end
  end
  return low
end

-- Returns the predictions that share a prefix with a chain: a list of { id, prediction, steps = of the chain that are held with
-- it, whole = is all of it shared? }.
local function matches_of(keys, chain, now)
  local matches, chain_steps = {}, #chain / HASH_BYTES
  for first = 0, chain_steps - 1, CHUNK do
    local probes = {}
    for i = first, math.min(first + CHUNK, chain_steps) - 1 do
      probes[#probes + 1] = string.sub(chain, i * HASH_BYTES + 1, i * HASH_BYTES + HASH_BYTES)
    end
    local found = redis.call('HMGET', keys[ANCHORS], unpack(probes))
    for i = 1, #probes do
      local ids = found[i]
      if ids then
        for at = 1, #ids, ID_BYTES do
          local id = string.sub(ids, at, at + ID_BYTES - 1)
          local prediction = get_prediction(keys, id)
          local first_step, hashes = first + i - 1, prediction[P_HASHES]
          if prediction[P_ENDS_US] > now and prediction[P_FIRST_STEP] == first_step then
            local steps = shared(chain, first_step * HASH_BYTES, hashes)
            matches[#matches + 1] = {
              id = id, prediction = prediction, steps = first_step + steps, whole = steps * HASH_BYTES == #hashes,
            }
          end
        end
      end
    end
  end
  return matches
end

-- Returns the us by which the i-th offer misses the SLO, and its level by what it would exceed (0: nothing that counts, 1:
-- chosen only if no 0 is left, 2: only if no 1 is). `reported_kv` nil: the worker's load is unknown.
local function check_limits(limits, i, ttft_us, load_us, running, queued, reported_kv, cached)
  local rows, at = limits.rows, (i - 1) * LIMIT_FIELDS
  local most_ttft_us, most_decode_us, decode_us = limits.ttft_us, limits.decode_us, rows[at + DECODE_US]
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
    local slots, kv_tokens = rows[at + SLOTS], rows[at + KV_TOKENS]
    if slots > 0 and running >= slots then
      level = 2
    end
    -- what waits to be computed there will need its KV first
    if kv_tokens > 0 and reported_kv + queued + (limits.input_tokens - cached) > kv_tokens then
      level = 2
    end
  end
  return missed, level
end

-- Returns each offer's packed worker, in the offers' order.
local function loads_of(keys, offers)
  local names, records, nothing = {}, {}, no_worker()
  for at = OFFER_WORKER, #offers, OFFER_FIELDS do
    names[#names + 1] = offers[at]
  end
  for first = 1, #names, CHUNK do
    local found = redis.call('HMGET', keys[LOAD], unpack(names, first, math.min(first + CHUNK - 1, #names)))
    for i = 1, #found do
      records[first + i - 1] = found[i] or nothing
    end
  end
  return records
end

-- Returns the mean of the known loads, which stands in for an unknown one: {queued tokens, running requests, waiting requests,
-- KV tokens}.
local function mean_of(records, fresh)
  local known, all_queued, all_running, all_waiting, all_kv = 0, 0, 0, 0, 0
  for _, record in ipairs(records) do
    local sampled, _, queued, running, waiting, kv = struct.unpack(WORKER, record)
    if sampled > fresh then
      known = known + 1
      all_queued, all_running = all_queued + queued, all_running + running
      all_waiting, all_kv = all_waiting + waiting, all_kv + kv
    end
  end
  local mean = { all_queued, all_running, all_waiting, all_kv }
  for i, sum in ipairs(mean) do
    mean[i] = known > 0 and math.ceil(sum / known) or 0
  end
  return mean
end

-- Returns by worker its best prediction: { tokens = that it would use, ready_us }; the most tokens that some worker is
-- computing now; and each chain's matches.
local function best_predictions(keys, chains, kinds, offers, now)
  local matches, best, in_flight = {}, {}, 0
  if redis.call('EXISTS', keys[ANCHORS]) == 0 then
    return best, in_flight, matches
  end
  local kind_of = {}
  for at = 0, #offers - 1, OFFER_FIELDS do
    kind_of[offers[at + OFFER_WORKER]] = offers[at + KIND] * KIND_FIELDS
  end
  for c, chain in ipairs(chains) do
    matches[c] = matches_of(keys, chain.hashes, now)
    for _, match in ipairs(matches[c]) do
      local worker, ready_us = match.prediction[P_WORKER], match.prediction[P_READY_US]
      local k = kind_of[worker]
      if k and kinds[k + CHAIN] == c then
        local tokens = math.max(0, math.min(match.steps * chain.step_tokens, kinds[k + LIMIT]) - kinds[k + LOST])
        local before = best[worker]
        if not before or tokens > before.tokens or (tokens == before.tokens and ready_us < before.ready_us) then
          best[worker] = { tokens = tokens, ready_us = ready_us }
        end
      end
    end
  end
  for _, one in pairs(best) do
    if one.ready_us > now then
      in_flight = math.max(in_flight, one.tokens)
    end
  end
  return best, in_flight, matches
end

-- Returns
-- - the answer, an array: number of the cheapest offer (with a pair layout: of the one that computes the answer), number of the
--   offer that computes the prompt alone (0: none does), now, the mean load (empty: no load is unknown), tokens in flight,
--   { { worker with a prediction, its tokens, when they are ready us }... }, each offer's packed worker. The client works out
--   from it how each offer was evaluated, if that is needed.
-- - what a booking needs: { chosen, prefill = the two numbers; by number of the offer: backlog_us, and if it uses a prediction,
--   used = the tokens, wait_us = us to wait for them; matches = by number of the chain }
local function evaluate(keys, ask, now)
  local fresh, again_factor, chains, kinds, offers = now - ask.stale_us, ask.again_factor, ask.chains, ask.kinds, ask.offers
  local limits, pair_layout = ask.limits, ask.pair_layout
  local records, mean = loads_of(keys, offers), nil
  local best, in_flight, matches = best_predictions(keys, chains, kinds, offers, now)
  local backlogs, used, waits = {}, {}, {}
  local chosen, least, lowest, scores, levels = 1, math.huge, math.huge, {}, {}
  local read = struct.unpack
  for i = 1, #records do
    local at = (i - 1) * OFFER_FIELDS
    local k = offers[at + KIND] * KIND_FIELDS
    local sampled, _, queued, running, waiting, reported_kv, more, more_running, more_kv = read(WORKER, records[i])
    local known, kv = sampled > fresh, reported_kv
    if not known then
      mean = mean or mean_of(records, fresh)
      queued, running, waiting, kv = unpack(mean)
    end
    queued, running, kv = queued + more, running + more_running, kv + more_kv
    local backlog_us = kinds[k + QUEUED_US] * (queued + waiting * kinds[k + WAITING_TOKENS])
    local load_us = kinds[k + RUNNING_US] * running + kinds[k + KV_US] * kv
    local score, level = offers[at + BASE] + backlog_us + load_us, 0
    local cached, wait_us = offers[at + CACHED], 0
    local prediction = best[offers[at + OFFER_WORKER]]
    if prediction and prediction.tokens > cached then
      local wait = math.max(0, prediction.ready_us - now - backlog_us)
      local other = score - (worth(kinds, k, prediction.tokens) - worth(kinds, k, cached)) + wait
      if other < score then
        score, cached, wait_us = other, prediction.tokens, wait
        used[i], waits[i] = cached, wait
      end
    end
    if in_flight > cached then
      score = score + again_factor * (worth(kinds, k, in_flight) - worth(kinds, k, cached))
    end
    if limits then
      local ttft_us = offers[at + WORK] - (worth(kinds, k, cached) - worth(kinds, k, offers[at + CACHED]))
      local missed
      missed, level = check_limits(
        limits, i, ttft_us + backlog_us + wait_us, load_us, running, queued, known and reported_kv or nil, cached
      )
      score = score + limits.slo_factor * missed
    end
    backlogs[i] = backlog_us
    if pair_layout then
      scores[i], levels[i] = score, level
    elseif level < lowest or (level == lowest and score < least) then
      chosen, least, lowest = i, score, level
    end
  end
  local prefill = 0
  if pair_layout then
    prefill, chosen = choose_pair(pair_layout, scores, levels)
  end
  local predictions = {}
  for worker, one in pairs(best) do
    predictions[#predictions + 1] = { worker, one.tokens, one.ready_us }
  end
  return { chosen, prefill, now, mean or {}, in_flight, predictions, records }, {
    chosen = chosen, prefill = prefill, backlog_us = backlogs, used = used, wait_us = waits, matches = matches,
  }
end
