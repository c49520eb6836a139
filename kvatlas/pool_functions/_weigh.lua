-- Weighing: which of the offered workers is cheapest now. The Python twin of this file is `kvatlas/reservations/weigh.py`.
--
-- ask, cmsgpack: { stale us, factor of computing again, { { tokens a step, packed step hashes }... }, offers,
--   limits (0 or absent: none are looked at), pairing (absent: one offer is chosen; see _pairing.lua) }
-- Offers and what is answered of them are rows of one flat list: a table for each of hundreds takes longer than all the rest.
-- offer: worker, number of its chain (0: none), steps it holds, cached tokens, most tokens that it can use, tokens lost
--   of a hit, cost without load, the part of it before the first token, us a queued token, us a running request, us a KV
--   token, tokens a waiting request stands for, us a prompt token, us a squared prompt token, predictions believed for us,
--   their capacity in steps. Offers come in the order in which ties go.
-- limits: { us to the first token (0: no limit), us for all others (0: none), factor of what is missed of them, 1 where missing
--   them filters, prompt tokens, rows of: request slots, KV tokens (0: not told), us for all tokens but the first without load }

local OFFER_WORKER, CHAIN, HELD_STEPS, CACHED, LIMIT, LOST, BASE, WORK = 1, 2, 3, 4, 5, 6, 7, 8
local QUEUED_US, RUNNING_US, KV_US, WAITING_TOKENS, TOKEN_US, SQUARE_US, BELIEVED_US, CAPACITY = 9, 10, 11, 12, 13, 14, 15, 16
local OFFER_FIELDS, WEIGHED_FIELDS = 16, 8

-- The number-th row of a flat list, as a table of its own.
local function row(list, number, fields)
  return { unpack(list, (number - 1) * fields + 1, number * fields) }
end

-- What holding so many tokens saves on the worker whose row begins behind `at`.
local function worth(offers, at, tokens)
  return offers[at + TOKEN_US] * tokens + offers[at + SQUARE_US] * tokens * tokens
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

local OVER_TTFT, OVER_TPOT, OVER_SLOTS, OVER_KV = 1, 2, 4, 8

-- What the i-th offer would go over: flags, the us by which it misses the SLO, and its place (0: nothing that counts, 1: chosen
-- only where no 0 is left, 2: only where no 1 is). `reported_kv` nil: the worker's load is not known.
local function judge(limits, i, ttft_us, load_us, running, queued, reported_kv, cached)
  local over, missed, level, each, at = 0, 0, 0, limits[6], (i - 1) * 3
  if limits[1] > 0 and ttft_us > limits[1] then
    over, missed = OVER_TTFT, ttft_us - limits[1]
  end
  if limits[2] > 0 and each[at + 3] + load_us > limits[2] then
    over, missed = over + OVER_TPOT, missed + (each[at + 3] + load_us - limits[2])
  end
  if over > 0 and limits[4] == 1 then
    level = 1
  end
  if reported_kv then
    local slots, kv_tokens = each[at + 1], each[at + 2]
    if slots > 0 and running >= slots then
      over, level = over + OVER_SLOTS, 2
    end
    -- what waits to be computed there will need its KV first
    if kv_tokens > 0 and reported_kv + queued + (limits[5] - cached) > kv_tokens then
      over, level = over + OVER_KV, 2
    end
  end
  return over, missed, level
end

-- Returns the number of the cheapest offer (of an ask with a pairing: of the one that computes the answer), and rows of: queued
-- tokens, running requests, waiting requests, KV tokens, load known, tokens held thanks to a prediction (0: none used), us to
-- wait for them, tokens that would be computed again; then what each chain met; the number of the offer that computes the prompt
-- alone (0: none does); and where an offer goes over limits rows of: flags of what it would go over, us by which it misses the SLO.
local function weigh(keys, ask, now)
  local stale_us, again_factor, chains, offers = ask[1], ask[2], ask[3], ask[4]
  local limits, pairing = ask[5] ~= 0 and ask[5] or nil, ask[6]
  local names, row_of = {}, {}
  for at = 0, #offers - 1, OFFER_FIELDS do
    local worker = offers[at + OFFER_WORKER]
    names[#names + 1], row_of[worker] = worker, at
  end
  local records, sums, known = {}, { 0, 0, 0, 0 }, 0
  for first = 1, #names, CHUNK do
    local found = redis.call('HMGET', keys[LOAD], unpack(names, first, math.min(first + CHUNK - 1, #names)))
    for i = 1, #found do
      local record = found[i] and cmsgpack.unpack(found[i]) or { '', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
      records[first + i - 1] = record
      if now - record[SAMPLED] < stale_us then
        known = known + 1
        for j = 1, 4 do
          sums[j] = sums[j] + record[QUEUED + j - 1]
        end
      end
    end
  end
  for j = 1, 4 do
    sums[j] = known > 0 and math.ceil(sums[j] / known) or 0
  end

  local met, best, in_flight = {}, {}, 0
  if redis.call('EXISTS', keys[ANCHORS]) == 1 then
    for c, chain in ipairs(chains) do
      met[c] = meet(keys, chain[2], now)
      for _, one in ipairs(met[c]) do
        local prediction = one[2]
        local at = row_of[prediction[1]]
        if at and offers[at + CHAIN] == c then
          local tokens = math.max(0, math.min(one[3] * chain[1], offers[at + LIMIT]) - offers[at + LOST])
          local before = best[at]
          if not before or tokens > before[1] or (tokens == before[1] and prediction[2] < before[2]) then
            best[at] = { tokens, prediction[2] }
          end
        end
      end
    end
    for _, one in pairs(best) do
      if one[2] > now then
        in_flight = math.max(in_flight, one[1])
      end
    end
  end

  local weighed, chosen, least, lowest = {}, 1, math.huge, math.huge
  local judged, any_over, scores, levels = {}, false, {}, {}
  for i, record in ipairs(records) do
    local at, out = (i - 1) * OFFER_FIELDS, (i - 1) * WEIGHED_FIELDS
    local told = now - record[SAMPLED] < stale_us
    local queued = (told and record[QUEUED] or sums[1]) + record[BOOKED_QUEUED]
    local running = (told and record[RUNNING] or sums[2]) + record[BOOKED_RUNNING]
    local waiting = told and record[WAITING] or sums[3]
    local kv = (told and record[KV] or sums[4]) + record[BOOKED_KV]
    local backlog_us = offers[at + QUEUED_US] * (queued + waiting * offers[at + WAITING_TOKENS])
    local load_us = offers[at + RUNNING_US] * running + offers[at + KV_US] * kv
    local score, level = offers[at + BASE] + backlog_us + load_us, 0
    local cached, used, wait_us, again = offers[at + CACHED], 0, 0, 0
    local prediction = best[at]
    if prediction and prediction[1] > cached then
      local wait = math.max(0, prediction[2] - now - backlog_us)
      local other = score - (worth(offers, at, prediction[1]) - worth(offers, at, cached)) + wait
      if other < score then
        score, cached, used, wait_us = other, prediction[1], prediction[1], wait
      end
    end
    if in_flight > cached then
      again = in_flight - cached
      score = score + again_factor * (worth(offers, at, in_flight) - worth(offers, at, cached))
    end
    weighed[out + 1], weighed[out + 2], weighed[out + 3], weighed[out + 4] = queued, running, waiting, kv
    weighed[out + 5], weighed[out + 6], weighed[out + 7], weighed[out + 8] = told and 1 or 0, used, wait_us, again
    if limits then
      local ttft_us = offers[at + WORK] - (worth(offers, at, cached) - worth(offers, at, offers[at + CACHED]))
      local over, missed
      over, missed, level = judge(
        limits, i, ttft_us + backlog_us + wait_us, load_us, running, queued, told and record[KV] or nil, cached
      )
      judged[2 * i - 1], judged[2 * i] = over, missed
      any_over = any_over or over > 0
      score = score + limits[3] * missed
    end
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
  return chosen, weighed, met, prefill, any_over and judged or {}
end
