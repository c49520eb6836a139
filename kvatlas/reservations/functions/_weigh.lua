-- Weighing: which of the offered workers is cheapest now. The Python twin of this file is `kvatlas/reservations/weigh.py`.
--
-- ask, cmsgpack: { stale us, factor of computing again, { { tokens a step, packed step hashes }... }, kinds, offers,
--   limits (0 or absent: none are looked at), pairing (absent: one offer is chosen; see _pairing.lua) }
-- Kinds and offers are rows of flat lists: a table for each of hundreds takes longer than all the rest.
-- kind: number of its chain (0: none), most tokens that can be used, tokens lost of a hit, us a queued token, us a running
--   request, us a KV token, tokens a waiting request stands for, us a prompt token, us a squared prompt token, us a hit,
--   predictions believed for us, their capacity in steps.
-- offer: worker, number of its kind (from 0), steps it holds, cached tokens, cost without load, the part of it before the first
--   token. Offers come in the order in which ties go.
-- limits: { us to the first token (0: no limit), us for all others (0: none), factor of what is missed of them, 1 where missing
--   them filters, prompt tokens, rows of: request slots, KV tokens (0: not told), us for all tokens but the first without load }

local CHAIN, LIMIT, LOST, QUEUED_US, RUNNING_US, KV_US, WAITING_TOKENS = 1, 2, 3, 4, 5, 6, 7
local TOKEN_US, SQUARE_US, HIT_US, BELIEVED_US, CAPACITY, KIND_FIELDS = 8, 9, 10, 11, 12, 12
local OFFER_WORKER, KIND, HELD_STEPS, CACHED, BASE, WORK, OFFER_FIELDS = 1, 2, 3, 4, 5, 6, 6

-- What holding so many tokens saves on workers of the kind whose row begins behind `k`.
local function worth(kinds, k, tokens)
  local us = kinds[k + TOKEN_US] * tokens + kinds[k + SQUARE_US] * tokens * tokens
  return tokens > 0 and us - kinds[k + HIT_US] or us
end

-- How many leading steps two packed chains share: equal hashes mean that all before them are equal too.
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

-- The predictions that a chain meets: a list of { id, prediction, steps of the chain held with it, all of it }.
local function meet(keys, chain, now)
  local met, count_of = {}, #chain / HASH_BYTES
  for first = 0, count_of - 1, CHUNK do
    local probes = {}
    for i = first, math.min(first + CHUNK, count_of) - 1 do
      probes[#probes + 1] = string.sub(chain, i * HASH_BYTES + 1, i * HASH_BYTES + HASH_BYTES)
    end
    local found = redis.call('HMGET', keys[ANCHORS], unpack(probes))
    for i = 1, #probes do
      local ids = found[i]
      if ids then
        for at = 1, #ids, ID_BYTES do
          local id = string.sub(ids, at, at + ID_BYTES - 1)
          local prediction = get_prediction(keys, id)
          if prediction[4] > now and prediction[6] == first + i - 1 then
            local steps = shared(chain, (first + i - 1) * HASH_BYTES, prediction[8])
            met[#met + 1] = { id, prediction, first + i - 1 + steps, steps * HASH_BYTES == #prediction[8] }
          end
        end
      end
    end
  end
  return met
end

-- What the i-th offer would go over: the us by which it misses the SLO, and its place (0: nothing that counts, 1: chosen only
-- where no 0 is left, 2: only where no 1 is). `reported_kv` nil: the worker's load is not known.
local function judge(limits, i, ttft_us, load_us, running, queued, reported_kv, cached)
  local missed, level, each, at = 0, 0, limits[6], (i - 1) * 3
  if limits[1] > 0 and ttft_us > limits[1] then
    missed = ttft_us - limits[1]
  end
  if limits[2] > 0 and each[at + 3] + load_us > limits[2] then
    missed = missed + (each[at + 3] + load_us - limits[2])
  end
  if missed > 0 and limits[4] == 1 then
    level = 1
  end
  if reported_kv then
    local slots, kv_tokens = each[at + 1], each[at + 2]
    if slots > 0 and running >= slots then
      level = 2
    end
    -- what waits to be computed there will need its KV first
    if kv_tokens > 0 and reported_kv + queued + (limits[5] - cached) > kv_tokens then
      level = 2
    end
  end
  return missed, level
end

-- What is known of each offer's worker, packed, in the offers' order.
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

-- What a worker is taken to have whose load is not known: queued tokens, running, waiting requests, KV tokens.
local function mean_of(records, fresh)
  local sums, known = { 0, 0, 0, 0 }, 0
  for _, record in ipairs(records) do
    local sampled, _, queued, running, waiting, kv = struct.unpack(WORKER, record)
    if sampled > fresh then
      known = known + 1
      sums[1], sums[2], sums[3], sums[4] = sums[1] + queued, sums[2] + running, sums[3] + waiting, sums[4] + kv
    end
  end
  for j = 1, 4 do
    sums[j] = known > 0 and math.ceil(sums[j] / known) or 0
  end
  return sums
end

-- By worker its best prediction: { tokens that it would use, ready us }; the most tokens that somebody is computing now; and
-- what each chain met.
local function predicted(keys, chains, kinds, offers, now)
  local met, best, in_flight = {}, {}, 0
  if redis.call('EXISTS', keys[ANCHORS]) == 0 then
    return best, in_flight, met
  end
  local kind_of = {}
  for at = 0, #offers - 1, OFFER_FIELDS do
    kind_of[offers[at + OFFER_WORKER]] = offers[at + KIND] * KIND_FIELDS
  end
  for c, chain in ipairs(chains) do
    met[c] = meet(keys, chain[2], now)
    for _, one in ipairs(met[c]) do
      local worker, ready = one[2][1], one[2][2]
      local k = kind_of[worker]
      if k and kinds[k + CHAIN] == c then
        local tokens = math.max(0, math.min(one[3] * chain[1], kinds[k + LIMIT]) - kinds[k + LOST])
        local before = best[worker]
        if not before or tokens > before[1] or (tokens == before[1] and ready < before[2]) then
          best[worker] = { tokens, ready }
        end
      end
    end
  end
  for _, one in pairs(best) do
    if one[2] > now then
      in_flight = math.max(in_flight, one[1])
    end
  end
  return best, in_flight, met
end

-- Returns what is answered: { number of the cheapest offer (of an ask with a pairing: of the one that computes the answer), number
-- of the offer that computes the prompt alone (0: none does), now, the mean load (absent: nobody's is unknown), tokens in flight,
-- workers with a prediction, its tokens and when they are ready, each offer's worker as it is packed }: who asks works out from it
-- what each offer was judged by, when somebody looks. Then what a booking needs, by number of the offer: the us of its backlog, the
-- tokens used thanks to a prediction and the us to wait for them, where there is one; then what each chain met.
local function weigh(keys, ask, now)
  local fresh, again_factor, chains, kinds, offers = now - ask[1], ask[2], ask[3], ask[4], ask[5]
  local limits, pairing = ask[6] ~= 0 and ask[6] or nil, ask[7]
  local records, mean = loads_of(keys, offers), nil
  local best, in_flight, met = predicted(keys, chains, kinds, offers, now)
  local seen = { backlog_us = {}, used = {}, wait_us = {} }
  local backlogs, chosen, least, lowest, scores, levels = seen.backlog_us, 1, math.huge, math.huge, {}, {}
  local read = struct.unpack
  for i = 1, #records do
    local at = (i - 1) * OFFER_FIELDS
    local k = offers[at + KIND] * KIND_FIELDS
    local sampled, _, queued, running, waiting, reported_kv, more, more_running, more_kv = read(WORKER, records[i])
    local told, kv = sampled > fresh, reported_kv
    if not told then
      mean = mean or mean_of(records, fresh)
      queued, running, waiting, kv = mean[1], mean[2], mean[3], mean[4]
    end
    queued, running, kv = queued + more, running + more_running, kv + more_kv
    local backlog_us = kinds[k + QUEUED_US] * (queued + waiting * kinds[k + WAITING_TOKENS])
    local load_us = kinds[k + RUNNING_US] * running + kinds[k + KV_US] * kv
    local score, level = offers[at + BASE] + backlog_us + load_us, 0
    local cached, wait_us = offers[at + CACHED], 0
    local prediction = best[offers[at + OFFER_WORKER]]
    if prediction and prediction[1] > cached then
      local wait = math.max(0, prediction[2] - now - backlog_us)
      local other = score - (worth(kinds, k, prediction[1]) - worth(kinds, k, cached)) + wait
      if other < score then
        score, cached, wait_us = other, prediction[1], wait
        seen.used[i], seen.wait_us[i] = cached, wait
      end
    end
    if in_flight > cached then
      score = score + again_factor * (worth(kinds, k, in_flight) - worth(kinds, k, cached))
    end
    if limits then
      local ttft_us = offers[at + WORK] - (worth(kinds, k, cached) - worth(kinds, k, offers[at + CACHED]))
      local missed
      missed, level = judge(
        limits, i, ttft_us + backlog_us + wait_us, load_us, running, queued, told and reported_kv or nil, cached
      )
      score = score + limits[3] * missed
    end
    backlogs[i] = backlog_us
    if pairing then
      scores[i], levels[i] = score, level
    elseif level < lowest or (level == lowest and score < least) then
      chosen, least, lowest = i, score, level
    end
  end
  local prefill = 0
  if pairing then
    prefill, chosen = choose_pair(pairing, scores, levels)
  end
  local predictions = {}
  for worker, one in pairs(best) do
    predictions[#predictions + 1] = { worker, one[1], one[2] }
  end
  return { chosen, prefill, now, mean or {}, in_flight, predictions, records }, seen, met
end
