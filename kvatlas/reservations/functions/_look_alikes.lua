-- Finds the cheapest of many look-alikes without looking at all of them: the threshold algorithm (R. Fagin, A. Lotem, M. Naor:
-- Optimal aggregation algorithms for middleware, 2001) over the orders of _orders.lua.
--
-- A look-alike costs what the offer to its group costs without load, plus its load times the kind's prices. Look-alikes are
-- read in one or several orders at once, whose weights add up to the prices. So one that was not read costs at least as much as
-- the offer, plus for each order its weight times the last sum read there. If the best so far costs no more than that, it is
-- the best of all. Look-alikes that have a prediction, or whose sample has just become too old, cost something else and are
-- weighed one by one.

local FIRST_READ, MOST_READ = 4, 512
local ROUNDING_US = 1 -- equal sums may differ in cost by this much
local MOST_RETURNED, MOST_LOOKED_UP = 32, 4 -- the latter if the choice looked up what they hold
local MOST_WEIGHED, MOST_OVERDUE = 160, 64 -- of one ask
local MOST_EQUALS = 10000 -- if more have the lowest score, they are read in order, not from the place of the ask on the ring

-- Finds the groups of the ask's look-alikes, and which of the look-alikes are weighed one by one. Returns false if there are
-- too few of them.
local function find_look_alikes(state)
  local keys, ask, members = state.keys, state.ask, 0
  state.left = MOST_WEIGHED
  for _, worker in ipairs(ask.skipped) do
    state.named[worker] = true
  end
  for at = 0, #ask.look_alikes - 1, OFFER_FIELDS do
    local group = tonumber(redis.call('HGET', keys[GROUPS], ask.look_alikes[at + OFFER_WORKER]))
    state.group_of_row[at] = group
    if group and not state.row_of[group] then
      state.row_of[group] = at
      local low, high = group * 2 * FAMILY, (group * 2 + 2) * FAMILY
      members = members + redis.call(
        'ZCOUNT', keys[ORDER_QUEUED], string.format('%d', low), string.format('(%d', high)
      )
    end
  end
  if members < ask.least_members then
    return false
  end
  local old = redis.call('ZRANGEBYSCORE', keys[SAMPLES], '-inf', string.format('%d', state.fresh), 'LIMIT', 0, MOST_OVERDUE)
  for i, packed in ipairs(records_of(keys, old)) do
    local worker = old[i]
    if not state.named[worker] and row_for(state, worker, packed) then
      state.packed_of[worker] = packed
      state.overdue[#state.overdue + 1] = worker
      kind_for(state, worker)
    end
  end
  return true
end

-- Finds the workers that the ask's lookup names, in place of look-alikes.
local function find_named(state)
  local lookup, rows = state.ask.lookup, state.ask.look_alikes
  state.left, state.looked_up = #lookup.named, records_of(state.keys, lookup.named)
  for i, worker in ipairs(lookup.named) do
    state.named[worker], state.packed_of[worker] = true, state.looked_up[i]
    state.kind_of[worker] = rows[lookup.row_of[worker] + KIND] * KIND_FIELDS
  end
end

-- Returns the place of a worker on the ring.
local function place_on_ring(worker)
  return tonumber(string.sub(redis.sha1hex(worker), 1, 8), 16)
end

-- Weighs one of the look-alikes whose row begins after `at`. ring_place: where it stands on the ring. `own`: its own row,
-- instead of theirs.
local function weigh_member(state, at, worker, packed, ring_place, own)
  local limits, slots, kv_tokens, decode_us = state.ask.limits, 0, 0, 0
  if limits then
    decode_us = limits.of_look_alikes[at / OFFER_FIELDS + 1]
    if not limits.look_alikes_have_room then
      slots, kv_tokens = number_in(packed, SLOTS), number_in(packed, KV_LIMIT)
    end
  end
  state.count, state.left = state.count + 1, state.left - 1
  local rows, row_at = own or state.ask.look_alikes, own and 0 or at
  local score, level = weigh(state, state.count, rows, row_at, worker, packed, slots, kv_tokens, decode_us)
  prefer(state, state.count, score, level, (ring_place - state.ask.ring) % 4294967296)
end

-- Returns cursors of the orders to be read, { order, weight, last = the last sum read, at, family }..., with weights that add
-- up to the costs of a queued token, a running request, a KV token, and a waiting request (per token that it stands for in the
-- mix).
local function cursors_for(queued_us, running_us, kv_us, waiting_us, family)
  local mix = math.min(queued_us, waiting_us, running_us / MIX_TOKENS, kv_us / (MIX_TOKENS * KV_PER_RUNNING))
  local cursors = {}
  local function add(order, left, whole)
    if left > whole * 1e-9 then
      cursors[#cursors + 1] = { order = order, weight = left, last = 0, at = 0, family = family * FAMILY }
    end
  end
  add(ORDER_MIX, mix, 0)
  add(ORDER_QUEUED, queued_us - mix, queued_us)
  add(ORDER_RUNNING, running_us - mix * MIX_TOKENS, running_us)
  add(ORDER_KV, kv_us - mix * MIX_TOKENS * KV_PER_RUNNING, kv_us)
  if #cursors == 0 then
    cursors[1] = { order = ORDER_QUEUED, weight = 0, last = 0, at = 0, family = family * FAMILY }
  end
  return cursors
end

-- Returns the place on the ring of a member of an order.
local function place_of(member)
  local ring_place = tonumber(string.sub(member, 1, 8), 16)
  if not ring_place then
    damaged('order of loads')
  end
  return ring_place
end

local function read_range(key, low, high, at, most)
  return redis.call('ZRANGEBYSCORE', key, low, high, 'WITHSCORES', 'LIMIT', at, most)
end

-- Returns the next members of a cursor with their scores, flat, and whether they are the last ones. If more look-alikes have
-- the lowest score than are read at once, they are read from the ask's place on the ring on (`equals`: how many of them are
-- left).
local function read_next(state, cursor, most)
  local key = state.keys[cursor.order]
  local low, high = string.format('%d', cursor.family), string.format('(%d', cursor.family + FAMILY)
  if cursor.at == 0 and not cursor.turned then
    local first = read_range(key, low, high, 0, most)
    local read = #first / 2
    local all_equal = read == most and first[2] == first[#first]
    local size = all_equal and redis.call('ZCOUNT', key, first[2], first[2])
    if not all_equal or size > MOST_EQUALS then
      cursor.at = read
      return first, read < most
    end
    local left, right = 0, size
    while left < right do
      local middle = math.floor((left + right) / 2)
      local member = redis.call('ZRANGEBYSCORE', key, first[2], first[2], 'LIMIT', middle, 1)[1]
      if place_of(member) < state.ask.ring then
        left = middle + 1
      else
        right = middle
      end
    end
    cursor.turned, cursor.size, cursor.equals, cursor.place = true, size, size, left % size
  end
  if cursor.equals and cursor.equals > 0 then -- on to the end of the equals, then from their beginning
    local take = math.min(most, cursor.equals, cursor.size - cursor.place)
    local found = read_range(key, low, high, cursor.place, take)
    cursor.place, cursor.equals = (cursor.place + take) % cursor.size, cursor.equals - take
    cursor.at = cursor.size
    return found, false
  end
  local found = read_range(key, low, high, cursor.at, most)
  cursor.at = cursor.at + #found / 2
  return found, #found / 2 < most
end

-- Returns what the offer to a family's group costs without any load that is read, and the surcharge for computing again what
-- another worker is computing now. In a family of unknown loads, the mean of the known ones is part of the cost.
local function least_costs(state, at, family)
  local ask, kinds, row = state.ask, state.ask.kinds, state.ask.look_alikes
  local k = row[at + KIND] * KIND_FIELDS
  local without_load_us, again_us = row[at + BASE], 0
  if family % 2 == 0 then -- the family of unknown loads
    state.mean = state.mean or mean_of(state)
    local queued, running, waiting, kv = unpack(state.mean)
    without_load_us = without_load_us + kinds[k + QUEUED_US] * (queued + waiting * kinds[k + WAITING_TOKENS])
      + (kinds[k + RUNNING_US] * running + kinds[k + KV_US] * kv) + interference(kinds, k, row[at + WORK], running)
  end
  if state.in_flight > row[at + CACHED] then
    again_us = ask.again_factor * (worth(kinds, k, state.in_flight) - worth(kinds, k, row[at + CACHED]))
  end
  return without_load_us, again_us
end

-- Weighs those of an order's next `most` look-alikes that have not been weighed yet. Returns whether these were the last ones.
local function weigh_next(state, cursor, at, family, most)
  local found, ended = read_next(state, cursor, most)
  local workers, places = {}, {}
  for i = 1, #found, 2 do
    local worker = string.sub(found[i], 9)
    if not state.seen[worker] then
      state.seen[worker] = true
      workers[#workers + 1], places[#places + 1] = worker, place_of(found[i])
    end
    cursor.last = (tonumber(found[i + 1]) - cursor.family) / STEPS_PER_TOKEN
  end
  for i, packed in ipairs(records_of(state.keys, workers)) do
    if group_in(packed) ~= math.floor(family / 2) then
      damaged('order of loads')
    end
    weigh_member(state, at, workers[i], packed, places[i])
  end
  return ended
end

-- Weighs look-alikes of one family until none of the remaining ones can be cheaper than the best one so far.
local function weigh_family(state, at, family)
  local without_load_us, again_us = least_costs(state, at, family)
  if state.lowest == 0 and state.least < without_load_us + again_us then
    return
  end
  local kinds, k = state.ask.kinds, state.ask.look_alikes[at + KIND] * KIND_FIELDS
  local queued_us, running_us = kinds[k + QUEUED_US], kinds[k + RUNNING_US] -- and what it is delayed by computing this prompt
  local cursors = cursors_for(
    queued_us, running_us + interference(kinds, k, state.ask.look_alikes[at + WORK], 1), kinds[k + KV_US],
    queued_us * kinds[k + WAITING_TOKENS] / TOKENS_PER_WAITING, family
  )
  local most, others = FIRST_READ, state.count
  while true do
    local all_read, threshold, all_equal = false, without_load_us, true
    for _, cursor in ipairs(cursors) do
      if state.left <= 0 then
        return
      end
      local ended = weigh_next(state, cursor, at, family, math.min(most, state.left))
      all_read = all_read or ended
    end
    if all_read then
      return
    end
    for _, cursor in ipairs(cursors) do
      threshold = threshold + cursor.weight * cursor.last
      all_equal = all_equal and (cursor.equals or 0) > 0
    end
    all_equal = all_equal and state.chosen > others -- the best so far is one of the equals
    if state.lowest == 0 and state.least < threshold + again_us + (all_equal and ROUNDING_US or 0) then
      return
    end
    most = math.min(most * 2, MOST_READ)
  end
end

-- Returns the groups, beginning with the cheapest without load, because MOST_WEIGHED may end the search. If several are equal,
-- the prompt decides which of them comes first.
local function groups_in_order(state)
  local groups, row = {}, state.ask.look_alikes
  for group in pairs(state.row_of) do
    groups[#groups + 1] = group
  end
  local function turned(group)
    return (group * 2654435761 + state.ask.ring) % 4294967296
  end
  table.sort(groups, function(a, b)
    local base_a, base_b = row[state.row_of[a] + BASE], row[state.row_of[b] + BASE]
    return base_a < base_b or (base_a == base_b and turned(a) < turned(b))
  end)
  return groups
end

-- Weighs as many of the ask's look-alikes as necessary.
local function weigh_look_alikes(state)
  state.seen = {}
  for worker in pairs(state.named) do
    state.seen[worker] = true
  end
  for _, worker in ipairs(state.extras) do
    state.seen[worker] = true
    local packed = state.packed_of[worker]
    weigh_member(state, row_for(state, worker, packed), worker, packed, place_on_ring(worker))
  end
  for _, group in ipairs(groups_in_order(state)) do
    weigh_family(state, state.row_of[group], group * 2 + 1)
    weigh_family(state, state.row_of[group], group * 2)
  end
end

-- Returns the chosen number, and the look-alikes that were read (not all if these are many), the chosen one first: { worker,
-- number of its row of look-alikes, packed worker, blocks that it holds (0 without a lookup)... }. Their numbers follow those
-- of the offers.
local function list_members(state)
  local offers, chosen, members = #state.offered, state.chosen, {}
  local function add(number)
    local at = state.row_at and state.row_at[number] or state.at[number]
    members[#members + 1], members[#members + 2], members[#members + 3], members[#members + 4] =
      state.workers[number], at / OFFER_FIELDS + 1, state.records[number], state.depths and state.depths[number] or 0
  end
  if chosen > offers then
    add(chosen)
  end
  local most = state.looked_up[1] and #state.looked_up or state.row_at and MOST_LOOKED_UP or MOST_RETURNED
  for number = offers + 1, math.min(state.count, offers + most) do
    if number ~= chosen then
      add(number)
    end
  end
  return chosen > offers and offers + 1 or chosen, members
end
