-- Finds the cheapest of many look-alikes that hold different parts of a prompt, in one call and without looking at all.
--
-- What a look-alike costs without load falls with the blocks that it holds, and load only adds to it. So one that was not
-- weighed costs at least what its row costs for the most blocks that any of them holds, plus the least load not read.
-- Look-alikes are weighed in this order, until none of the rest can cost less than the best so far:
-- 1. the deepest holders, one depth after the other, as long as few have the same depth; then all other holders that may be
--    the cheapest, unless they are very many;
-- 2. those with a prediction, an overdue sample, or a session;
-- 3. the others by their load, as in _look_alikes.lua. Each is looked up in the index only at the depth that it would need.
-- Each step has a limit. If one of the rest may still be the cheapest then, the client has to look them up.
--
-- lookup, cmsgpack: { keys of the index: blocks of the scope, active, workers, held; scope id, { { tokens that a hash stands
--   for, packed hashes }... }, reuse, odd workers: { worker, number of its row of look-alikes... }, worker of the session ('':
--   none), us that it costs less }
-- reuse: a row for each row of look-alikes: number of its chain (0: none), tokens that can be used at most, tokens of a hit
--   that are lost, 1 if they are lost before the hit is limited, share that counts, multiple to which the rest is cut.
-- The rows of look-alikes are about workers that hold nothing. Several rows may have one likeness: the first is for all its
-- workers that are not odd.

local REUSE_CHAIN, MOST_TOKENS, LOST_TOKENS, LOSES_FIRST, SHARE, UNIT, REUSE_FIELDS = 1, 2, 3, 4, 5, 6, 6
local MOST_RUNS = 16 -- depths that are read one after the other
local MOST_HOLDERS, MOST_PROBED = 320, 256 -- look-alikes weighed because they hold blocks, and looked up in the order of loads
local READS_A_PROBE = 8 -- so many that are read in that order and can't be the cheapest count as one that is looked up
local NOT_IN_HBM, TOO_MANY = -2, -3 -- answers instead of a choice
local NEARLY_US = 0.001 -- sums of the same numbers in another order differ by less

-- Returns how many of the tokens that a worker holds its engine uses.
local function reused(reuse, r, tokens)
  local most, lost = reuse[r + MOST_TOKENS], reuse[r + LOST_TOKENS]
  local usable = reuse[r + LOSES_FIRST] == 1 and math.min(tokens - lost, most) or math.min(tokens, most) - lost
  if reuse[r + SHARE] < 1 then
    usable = math.floor(usable * reuse[r + SHARE])
  end
  return math.max(0, usable - usable % reuse[r + UNIT])
end

-- Returns where the reuse of the row after `at` begins, its kind, and its chain (nil: its workers hold no block of the prompt).
local function terms_of(state, at)
  local lookup, rows = state.ask.lookup, state.ask.look_alikes
  local r = at / OFFER_FIELDS * REUSE_FIELDS
  return r, rows[at + KIND] * KIND_FIELDS, state.chains[lookup.reuse[r + REUSE_CHAIN]]
end

-- Returns the tokens that a worker of a row uses if it holds so many blocks.
local function cached_at(state, at, depth)
  local r, _, chain = terms_of(state, at)
  return chain and reused(state.ask.lookup.reuse, r, depth * chain.tokens) or 0
end

-- Weighs a look-alike that holds so many blocks.
local function weigh_at(state, at, worker, packed, depth, ring_place)
  local ask, _, k, chain = state.ask, terms_of(state, at)
  local rows, cached = ask.look_alikes, cached_at(state, at, depth)
  local saved, base_us, steps = worth(ask.kinds, k, cached), rows[at + BASE], ask.chains[ask.kinds[k + CHAIN]]
  if worker == ask.lookup.home then
    base_us = base_us - ask.lookup.home_us
  end
  local row = {
    worker, rows[at + KIND], steps and chain and math.floor(depth * chain.tokens / steps.step_tokens) or 0, cached,
    base_us - saved, rows[at + WORK] - saved,
  }
  local number = state.count + 1
  state.row_at[number], state.depths[number] = at, depth
  weigh_member(state, at, worker, packed, ring_place or place_on_ring(worker), row)
end

-- Returns what a worker of a row costs at least without load if it holds no more blocks, and what it computes at least.
local function least_of(state, at, depth)
  local ask, rows, _, k = state.ask, state.ask.look_alikes, terms_of(state, at)
  local kinds, cached = ask.kinds, cached_at(state, at, depth)
  local saved = math.max(0, worth(kinds, k, cached)) -- a small hit may cost more than it saves
  local least_us, again_us = rows[at + BASE] - saved, worth(kinds, k, state.in_flight)
  if state.in_flight > cached and again_us > saved then
    least_us = least_us + ask.again_factor * (again_us - saved)
  end
  return least_us + ask.again_factor * math.min(0, again_us), rows[at + WORK] - saved
end

-- Returns how many blocks workers of a row hold at most that were not weighed.
local function most_of(state, at)
  local _, _, chain = terms_of(state, at)
  return chain and chain.most or 0
end

-- Returns a family with its cursors by load, whose weights are those of its cheapest rows; nil if it is empty.
local function open_family(state, rows, number)
  local ask, queued_us, running_us, kv_us, waiting_us = state.ask, math.huge, math.huge, math.huge, math.huge
  local kinds, mean_us = ask.kinds, math.huge
  for _, at in ipairs(rows) do
    local _, k = terms_of(state, at)
    local _, work_us = least_of(state, at, most_of(state, at))
    local delay_us, waiting = interference(kinds, k, work_us, 1), kinds[k + QUEUED_US] * kinds[k + WAITING_TOKENS]
    queued_us, kv_us = math.min(queued_us, kinds[k + QUEUED_US]), math.min(kv_us, kinds[k + KV_US])
    running_us = math.min(running_us, kinds[k + RUNNING_US] + delay_us)
    waiting_us = math.min(waiting_us, waiting / TOKENS_PER_WAITING)
    if number % 2 == 0 then -- the family of unknown loads
      state.mean = state.mean or mean_of(state)
      local queued, running, waits, kv = unpack(state.mean)
      mean_us = math.min(mean_us, kinds[k + QUEUED_US] * queued + waiting * waits + kinds[k + KV_US] * kv
        + (kinds[k + RUNNING_US] + delay_us) * running)
    end
  end
  local family = {
    rows = rows, number = number, most = FIRST_READ,
    cursors = cursors_for(queued_us, running_us, kv_us, waiting_us, number),
  }
  local cursor, low = family.cursors[1], string.format('%d', number * FAMILY)
  local first = redis.call(
    'ZRANGEBYSCORE', state.keys[cursor.order], low, string.format('(%d', (number + 1) * FAMILY), 'WITHSCORES', 'LIMIT', 0, 1
  )
  if not first[1] then
    return nil
  end
  family.mean_us = number % 2 == 0 and mean_us or 0
  family.load_us = family.mean_us + cursor.weight * (tonumber(first[2]) - cursor.family) / STEPS_PER_TOKEN
  return family
end

local function open_families(state)
  local rows_of, families = {}, {}
  for at = 0, #state.ask.look_alikes - 1, OFFER_FIELDS do
    local group = state.group_of_row[at]
    if group then
      rows_of[group] = rows_of[group] or {}
      table.insert(rows_of[group], at)
    end
  end
  for group, rows in pairs(rows_of) do
    for believed = 1, 0, -1 do
      families[#families + 1] = open_family(state, rows, group * 2 + believed)
    end
  end
  return families
end

-- Returns true if a worker of a family that was not weighed may be the cheapest. slack_us: equals may differ by so much.
-- `only`: the chain of the workers that count.
local function may_be_cheaper(state, family, slack_us, only)
  for _, at in ipairs(family.ended and {} or family.rows) do
    local _, _, chain = terms_of(state, at)
    local counts = not only or chain == only
    if counts and state.lowest > 0 then
      return true
    elseif counts and state.least >= least_of(state, at, most_of(state, at)) + family.load_us + slack_us then
      return true
    end
  end
  return false
end

local function any_may_be_cheaper(state, families, chain)
  for _, family in ipairs(families) do
    if may_be_cheaper(state, family, -NEARLY_US, chain) then
      return true
    end
  end
  return false
end

-- Returns from how many blocks on a worker of a row may be the cheapest if its load costs at least this; nil: it can't be.
local function blocks_needed(state, at, load_us)
  local low, high = 1, most_of(state, at)
  local left_us = state.least - load_us + NEARLY_US
  if state.lowest > 0 or least_of(state, at, 0) <= left_us then
    return 0
  elseif least_of(state, at, high) > left_us then
    return nil
  end
  while low < high do
    local middle = math.floor((low + high) / 2)
    if least_of(state, at, middle) > left_us then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

-- Weighs those of an order's next `most` look-alikes that may be the cheapest. Returns whether they were the last ones.
local function weigh_next_by_load(state, family, cursor, most)
  local found, ended = read_next(state, cursor, most)
  local group, met, workers, asked = math.floor(family.number / 2), {}, {}, {}
  for i = 1, #found, 2 do
    local worker = string.sub(found[i], 9)
    cursor.last = (tonumber(found[i + 1]) - cursor.family) / STEPS_PER_TOKEN
    if not state.seen[worker] and not state.kind_of[worker] then -- others have something of their own
      state.seen[worker] = true
      local odd = state.ask.lookup.odd[worker]
      local at = odd and state.group_of_row[odd] == group and odd or state.row_of[group]
      local least = blocks_needed(state, at, family.mean_us + cursor.weight * cursor.last)
      if least then
        local one = { at = at, least = least, ring_place = place_of(found[i]) }
        met[#met + 1], workers[#workers + 1] = one, worker
        if most_of(state, at) > 0 then
          one.asked = #asked + 1
          asked[one.asked] = worker
        end
      end
    end
  end
  state.probes_left = state.probes_left - #met - #found / 2 / READS_A_PROBE
  local holders = holders_of(state.ask.lookup, asked)
  for i, packed in ipairs(records_of(state.keys, workers)) do
    if select(GROUP, struct.unpack(WORKER, packed)) ~= group then
      damaged('order of loads')
    end
    local one = met[i]
    local _, _, chain = terms_of(state, one.at)
    local depth = one.asked and depth_of(chain, holders[one.asked], one.least) or (not one.asked and 0)
    if depth then
      weigh_at(state, one.at, workers[i], packed, depth, one.ring_place)
      state.family_of[state.count] = family
    end
  end
  return ended
end

-- Reads on in the orders of a family, each time farther. Returns true if the best so far is one of equals that were read.
local function read_family(state, family)
  local most, all_equal = family.most, true
  family.most, family.load_us = math.min(most * 2, MOST_READ), family.mean_us
  for _, cursor in ipairs(family.cursors) do
    if state.probes_left > 0 then
      local read = math.min(most, math.ceil(state.probes_left))
      family.ended = weigh_next_by_load(state, family, cursor, read) or family.ended
    end
    family.load_us = family.load_us + cursor.weight * cursor.last
    all_equal = all_equal and (cursor.equals or 0) > 0
  end
  return all_equal and state.family_of[state.chosen] == family
end

-- Returns true if a look-alike that holds at most so many blocks may be the cheapest with its own load.
local function may_win(state, at, worker, packed, depth)
  local sampled, _, queued, running, waiting, kv, more, more_running, more_kv = struct.unpack(WORKER, packed)
  if sampled <= state.fresh or state.lowest > 0 or state.best[worker] or worker == state.ask.lookup.home then
    return true
  end
  local kinds, _, k = state.ask.kinds, terms_of(state, at)
  local load_us = kinds[k + QUEUED_US] * (queued + more + waiting * kinds[k + WAITING_TOKENS])
    + kinds[k + RUNNING_US] * (running + more_running) + kinds[k + KV_US] * (kv + more_kv)
  local least_us = least_of(state, at, depth) + load_us
  return least_us <= state.least + NEARLY_US or not is_finite(least_us)
end

-- Weighs holders of a chain; depth: the blocks that they hold, nil: not known, at least `least`.
local function weigh_holders(state, chain, holders, depth, least)
  local workers, holder_of = {}, {}
  state.holders_left = state.holders_left - #holders
  for i, worker in ipairs(holders[1] and read_index('HMGET', state.ask.lookup.active, unpack(holders)) or {}) do
    if worker and not state.seen[worker] then
      workers[#workers + 1], holder_of[worker] = worker, holders[i]
    end
  end
  for i, packed in ipairs(records_of(state.keys, workers)) do
    local worker = workers[i]
    local at = row_for(state, worker, packed)
    local _, _, own_chain = terms_of(state, at or 0)
    if at and own_chain == chain then
      state.seen[worker] = true
      if may_win(state, at, worker, packed, depth or chain.most) then
        weigh_at(state, at, worker, packed, depth or depth_of(chain, holder_of[worker], least) or 0)
      end
    end
  end
end

-- Returns from how many blocks on a worker that was not weighed may be the cheapest because of them.
local function blocks_that_matter(state, chain, families)
  local least = chain.most
  for _, family in ipairs(families) do
    for _, at in ipairs(family.rows) do
      local _, _, own_chain = terms_of(state, at)
      least = own_chain == chain and math.min(least, blocks_needed(state, at, family.load_us) or least) or least
    end
  end
  return math.max(1, least)
end

-- Weighs the holders of a chain, the deepest first.
local function weigh_deepest(state, chain, families)
  while any_may_be_cheaper(state, families, chain) do
    local holders = state.runs_left > 0 and state.holders_left >= MOST_IN_RUN and next_holders(chain)
    if not holders then
      break
    end
    state.runs_left = state.runs_left - 1
    weigh_holders(state, chain, holders, chain.place)
  end
  for _, family in ipairs(chain.most > 0 and families or {}) do
    if may_be_cheaper(state, family, -NEARLY_US, chain) and state.probes_left > 0 then
      read_family(state, family) -- the more is known to be cheap, the fewer holders matter
    end
  end
  if chain.most > 0 and any_may_be_cheaper(state, families, chain) then
    local least = blocks_that_matter(state, chain, families)
    local holders = other_holders(chain, least, state.holders_left)
    if holders then
      weigh_holders(state, chain, holders, nil, least)
      chain.most = least - 1
    end
  end
end

-- Weighs look-alikes of one family in the order of their load. Returns false if one that was not read may be the cheapest.
local function weigh_by_load(state, family)
  while may_be_cheaper(state, family, -NEARLY_US) do
    if state.probes_left <= 0 then
      return false
    elseif read_family(state, family) and not may_be_cheaper(state, family, ROUNDING_US) then
      return true
    end
  end
  return true
end

-- Weighs those that have something of their own: a prediction, an overdue sample, a session.
local function weigh_extras(state)
  for _, worker in ipairs(state.extras) do
    if not state.seen[worker] then
      state.seen[worker] = true
      local packed = state.packed_of[worker]
      local at = row_for(state, worker, packed)
      local _, _, chain = terms_of(state, at)
      weigh_at(state, at, worker, packed, chain and depth_of(chain, holders_of(state.ask.lookup, { worker })[1], 0) or 0)
    end
  end
end

-- Weighs as many of the ask's look-alikes as it takes. Returns why the client has to look them up instead (nil: it need not):
-- NOT_IN_HBM if the cheapest one holds blocks that are not in its HBM, so that it costs more, which only the client can price;
-- TOO_MANY if one that was not read may be the cheapest.
local function look_up(state)
  local lookup = state.ask.lookup
  state.chains, state.row_at, state.depths, state.seen = {}, {}, {}, {}
  state.runs_left, state.holders_left, state.probes_left, state.family_of = MOST_RUNS, MOST_HOLDERS, MOST_PROBED, {}
  for number, chain in ipairs(lookup.chains) do
    state.chains[number] = open_chain(lookup.blocks, chain[1], chain[2])
  end
  for worker in pairs(state.named) do
    state.seen[worker] = true
  end
  if lookup.home ~= '' then
    kind_for(state, lookup.home)
  end
  local families = open_families(state)
  for _, chain in ipairs(state.chains) do
    weigh_deepest(state, chain, families)
  end
  weigh_extras(state)
  for _, family in ipairs(families) do
    if not weigh_by_load(state, family) then
      return TOO_MANY
    end
  end
  local chosen = state.chosen
  if chosen > 0 then
    local _, _, chain = terms_of(state, state.row_at[chosen])
    if chain and not is_in_hbm(lookup, chain, state.workers[chosen], state.depths[chosen]) then
      return NOT_IN_HBM
    end
  end
end
