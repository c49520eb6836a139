-- Finds the cheapest of many look-alikes that hold different parts of a prompt, in one call and without looking at all of them.
--
-- The more blocks a look-alike holds, the less it costs without load, and load only adds to that. So one that was not
-- weighed costs at least what its row costs for the most blocks that any of them holds, plus the least load not read.
-- Look-alikes are weighed in this order, until none of the rest can cost less than the best so far:
-- 1. the deepest holders, in growing steps from the end of the prompt, as long as a step finds few; then all other holders
--    that may be the cheapest, unless they are very many;
-- 2. those with a prediction, an overdue sample, or a session;
-- 3. the others by their load, as in _look_alikes.lua. Each is looked up in the index only at the depth that it would need.
-- Each step has a limit. If one of the rest may still be the cheapest then, the client has to look them up.
-- In a small pool, the lookup names the workers: then each of these is weighed, and no other one.
--
-- lookup, cmsgpack: { keys of the index: blocks of the scope, active, workers, held; scope id, { { tokens that a hash stands
--   for, packed hashes }... }, reuse, odd workers: { worker, number of its row of look-alikes... }, worker of the session ('':
--   none), us that it costs less, named workers in the form of the odd ones }
-- reuse: a row for each row of look-alikes: number of its chain (0: none), tokens that can be used at most, tokens of a hit
--   that are lost, 1 if they are lost before the hit is limited, share that counts, multiple to which the rest is cut.
-- The rows of look-alikes are about workers that hold nothing. Several rows may have one likeness: the first is for all its
-- workers that are not odd.

local MOST_STEPS_BACK, MOST_IN_STEP = 20, 24 -- steps from the deepest holders on, and holders found by one; more are a crowd
local MOST_HOLDERS, MOST_PROBED = 320, 256 -- look-alikes weighed because they hold blocks, and looked up in the order of loads
local READS_A_PROBE = 8 -- this many that are read in that order and can't be the cheapest count as one lookup
local NOT_IN_HBM, TOO_MANY = -2, -3 -- answers instead of a choice

-- Weighs a look-alike from a row that holds this many blocks.
local function weigh_at(state, row, worker, packed, depth, ring_place)
  local ask, cached, base_us, steps = state.ask, cached_at(row, depth), row.base_us, 0
  local saved = worth(ask.kinds, row.k, cached)
  if worker == ask.lookup.home then
    base_us = base_us - ask.lookup.home_us
  end
  if row.step_tokens then
    steps = math.floor(depth * row.chain.tokens / row.step_tokens)
  end
  local own, number = { worker, row.kind, steps, cached, base_us - saved, row.work_us - saved }, state.count + 1
  state.row_at[number], state.depths[number] = row.at, depth
  weigh_member(state, row.at, worker, packed, ring_place or place_on_ring(worker), own)
end

-- Returns a family with its cursors by load, whose weights are those of its cheapest rows; nil if it is empty.
local function open_family(state, rows, number)
  local ask, queued_us, running_us, kv_us, waiting_us = state.ask, math.huge, math.huge, math.huge, math.huge
  local kinds, delays_us = ask.kinds, {}
  for i, row in ipairs(rows) do
    local k = row.k
    local delay_us = interference(kinds, k, least_work(row, cached_at(row, most_of(row))), 1)
    local waiting = kinds[k + QUEUED_US] * kinds[k + WAITING_TOKENS]
    delays_us[i] = delay_us
    queued_us, kv_us = math.min(queued_us, kinds[k + QUEUED_US]), math.min(kv_us, kinds[k + KV_US])
    running_us = math.min(running_us, kinds[k + RUNNING_US] + delay_us)
    waiting_us = math.min(waiting_us, waiting / TOKENS_PER_WAITING)
  end
  local family = {
    rows = rows, number = number, most = FIRST_READ, mean_us = 0,
    cursors = cursors_for(queued_us, running_us, kv_us, waiting_us, number),
  }
  local cursor, low = family.cursors[1], string.format('%d', number * FAMILY)
  local first = redis.call(
    'ZRANGEBYSCORE', state.keys[cursor.order], low, string.format('(%d', (number + 1) * FAMILY), 'WITHSCORES', 'LIMIT', 0, 1
  )
  if not first[1] then
    return nil
  end
  if number % 2 == 0 then -- the family of unknown loads
    state.mean, family.mean_us = state.mean or mean_of(state), math.huge
    local queued, running, waits, kv = unpack(state.mean)
    for i, row in ipairs(rows) do
      local k = row.k
      local mean_us = kinds[k + QUEUED_US] * (queued + kinds[k + WAITING_TOKENS] * waits) + kinds[k + KV_US] * kv
        + (kinds[k + RUNNING_US] + delays_us[i]) * running
      family.mean_us = math.min(family.mean_us, mean_us)
    end
  end
  family.load_us = family.mean_us + cursor.weight * (tonumber(first[2]) - cursor.family) / STEPS_PER_TOKEN
  return family
end

local function open_families(state)
  local rows_of, families = {}, {}
  for at = 0, #state.ask.look_alikes - 1, OFFER_FIELDS do
    local group = state.group_of_row[at]
    if group then
      rows_of[group] = rows_of[group] or {}
      table.insert(rows_of[group], state.opened[at])
    end
  end
  for group, rows in pairs(rows_of) do
    for believed = 1, 0, -1 do
      families[#families + 1] = open_family(state, rows, group * 2 + believed)
    end
  end
  return families
end

-- Returns true if a worker of a family that was not weighed may be the cheapest. slack_us: equals may differ by this
-- much.
-- `only`: the chain of the workers that count.
local function may_be_cheaper(state, family, slack_us, only)
  if family.ended then
    return false
  end
  local left_us = state.lowest > 0 and math.huge or state.least - family.load_us - slack_us
  for _, row in ipairs(family.rows) do
    local chain = row.chain
    if (not only or chain == only) and left_us >= least_at(row, chain and chain.most or 0) then
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

-- Weighs those of an order's next `most` look-alikes that may be the cheapest. Returns whether these were the last ones.
local function weigh_next_by_load(state, family, cursor, most)
  local found, ended = read_next(state, cursor, most)
  local group, met, workers, asked = math.floor(family.number / 2), {}, {}, {}
  for i = 1, #found, 2 do
    local worker = string.sub(found[i], 9)
    cursor.last = (tonumber(found[i + 1]) - cursor.family) / STEPS_PER_TOKEN
    if not state.seen[worker] and not state.kind_of[worker] then -- others have something of their own
      state.seen[worker] = true
      local odd = state.ask.lookup.odd[worker]
      local row = state.opened[odd and state.group_of_row[odd] == group and odd or state.row_of[group]]
      local least = blocks_needed(state, row, family.mean_us + cursor.weight * cursor.last)
      if least then
        local one = { row = row, least = least, ring_place = place_of(found[i]) }
        met[#met + 1], workers[#workers + 1] = one, worker
        if most_of(row) > 0 then
          one.asked = #asked + 1
          asked[one.asked] = worker
        end
      end
    end
  end
  state.probes_left = state.probes_left - #met - #found / 2 / READS_A_PROBE
  local holders = holders_of(state.ask.lookup, asked)
  for i, packed in ipairs(records_of(state.keys, workers)) do
    if group_in(packed) ~= group then
      damaged('order of loads')
    end
    local one = met[i]
    local depth = one.asked and depth_of(one.row.chain, holders[one.asked], one.least) or (not one.asked and 0)
    if depth then
      weigh_at(state, one.row, workers[i], packed, depth, one.ring_place)
      state.family_of[state.count] = family
    end
  end
  return ended
end

-- Reads on in the orders of a family, farther each time. Returns true if the best so far is one of several equals that were
-- read.
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

-- Returns true if a look-alike from a row that holds at most this many blocks may be the cheapest with its own load.
local function may_win(state, row, worker, packed, depth)
  local sampled, _, queued, running, waiting, kv, more, more_running, more_kv = struct.unpack(LOADS, packed)
  if sampled <= state.fresh or state.lowest > 0 or worker == state.ask.lookup.home then
    return true
  end
  local kinds, k, predicted = state.ask.kinds, row.k, state.best[worker]
  local backlog_us = kinds[k + QUEUED_US] * (queued + more + waiting * kinds[k + WAITING_TOKENS])
  local least_us, cached = least_at(row, depth), cached_at(row, depth)
  if predicted and predicted.tokens > cached then
    cached = predicted.tokens
    local wait_us = math.max(0, predicted.ready_us - state.now - backlog_us)
    least_us = math.min(least_us, least_with(row, cached) + wait_us)
  end
  running = running + more_running
  least_us = least_us + backlog_us + kinds[k + RUNNING_US] * running + kinds[k + KV_US] * (kv + more_kv)
    + interference(kinds, k, least_work(row, cached), running)
  return least_us <= state.least + NEARLY_US or not is_finite(least_us)
end

-- Weighs holders of a chain that hold at least this many blocks, and no more than chain.most.
local function weigh_holders(state, chain, holders, least)
  local workers, holder_of = {}, {}
  state.holders_left = state.holders_left - #holders
  for i, worker in ipairs(holders[1] and read_index('HMGET', state.ask.lookup.active, unpack(holders)) or {}) do
    if worker and not state.seen[worker] then
      workers[#workers + 1], holder_of[worker] = worker, holders[i]
    end
  end
  for i, packed in ipairs(records_of(state.keys, workers)) do
    local worker = workers[i]
    local row = state.opened[row_for(state, worker, packed)]
    if row and row.chain == chain then
      state.seen[worker] = true
      if may_win(state, row, worker, packed, chain.most) then
        weigh_at(state, row, worker, packed, depth_of(chain, holder_of[worker], least) or 0)
      end
    end
  end
  chain.most = least - 1
end

-- Returns the number of blocks from which on a worker that has not been weighed may be the cheapest because of them.
local function blocks_that_matter(state, chain, families)
  local least = chain.most
  for _, family in ipairs(families) do
    for _, row in ipairs(family.rows) do
      least = row.chain == chain and math.min(least, blocks_needed(state, row, family.load_us) or least) or least
    end
  end
  return math.max(1, least)
end

-- Weighs the holders of a chain, the deepest first: those of the last blocks, then of twice as many blocks in each
-- step.
local function weigh_deepest(state, chain, families)
  local step = 1
  while chain.most > 0 and state.steps_left > 0 and any_may_be_cheaper(state, families, chain) do
    local least = math.max(1, chain.most - step + 1)
    local holders = next_holders(chain, least, math.min(MOST_IN_STEP, state.holders_left))
    state.steps_left = state.steps_left - 1
    if holders then
      weigh_holders(state, chain, holders, least)
      step = step * 2
    elseif step == 1 then
      break -- a crowd
    else
      step = math.floor((step + 2) / 4)
    end
  end
  for _, family in ipairs(chain.most > 0 and families or {}) do
    if may_be_cheaper(state, family, -NEARLY_US, chain) and state.probes_left > 0 then
      read_family(state, family) -- the more is known to be cheap, the fewer holders matter
    end
  end
  if chain.most > 0 and any_may_be_cheaper(state, families, chain) then
    local least = blocks_that_matter(state, chain, families)
    local holders = next_holders(chain, least, state.holders_left)
    if holders then
      weigh_holders(state, chain, holders, least)
    end
  end
end

-- Weighs look-alikes of one family in the order of their load. Returns false if one that has not been read may be the cheapest.
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

-- Weighs the look-alikes that have something of their own: a prediction, an overdue sample, a session.
local function weigh_extras(state)
  local workers, rows, asked = {}, {}, {}
  for _, worker in ipairs(state.extras) do
    if not state.seen[worker] then
      state.seen[worker] = true
      local packed = state.packed_of[worker]
      local row = state.opened[row_for(state, worker, packed)]
      if may_win(state, row, worker, packed, most_of(row)) then
        workers[#workers + 1], rows[#rows + 1] = worker, row
        asked[#asked + 1] = most_of(row) > 0 and worker or nil
      end
    end
  end
  local holders, next_asked = holders_of(state.ask.lookup, asked), 1
  for i, worker in ipairs(workers) do
    local depth = 0
    if asked[next_asked] == worker then
      depth, next_asked = depth_of(rows[i].chain, holders[next_asked], 0) or 0, next_asked + 1
    end
    weigh_at(state, rows[i], worker, state.packed_of[worker], depth)
  end
end

-- Weighs the workers that the lookup names. Ties go to the first.
local function weigh_named(state)
  local lookup, held, holders = state.ask.lookup, false, {}
  for _, chain in ipairs(state.chains) do
    held = held or chain.most > 0
  end
  if held then
    holders = holders_of(lookup, lookup.named)
  end
  for i, worker in ipairs(lookup.named) do
    local at = lookup.row_of[worker]
    local row = state.opened[at] or open_row(state, at)
    state.opened[at] = row
    weigh_at(state, row, worker, state.looked_up[i], row.chain and depth_of(row.chain, holders[i], 0) or 0, i)
  end
end

-- Weighs as many of the look-alikes that are not named as necessary. Returns false if one that was not read may be the
-- cheapest.
local function weigh_some(state)
  for at in pairs(state.group_of_row) do
    state.opened[at] = open_row(state, at)
  end
  for worker in pairs(state.named) do
    state.seen[worker] = true
  end
  if state.ask.lookup.home ~= '' then
    kind_for(state, state.ask.lookup.home)
  end
  local families = open_families(state)
  for _, chain in ipairs(state.chains) do
    weigh_deepest(state, chain, families)
  end
  weigh_extras(state)
  for _, family in ipairs(families) do
    if not weigh_by_load(state, family) then
      return false
    end
  end
  return true
end

-- Weighs as many of the ask's look-alikes as it takes. Returns why the client has to look them up instead (nil: it need not):
-- NOT_IN_HBM if the cheapest one holds blocks that are not in its HBM, so that it costs more, which only the client can price;
-- TOO_MANY if one that was not read may be the cheapest.
local function look_up(state)
  local lookup = state.ask.lookup
  state.chains, state.opened, state.row_at, state.depths, state.seen = {}, {}, {}, {}, {}
  state.steps_left, state.holders_left, state.probes_left, state.family_of = MOST_STEPS_BACK, MOST_HOLDERS, MOST_PROBED, {}
  for number, chain in ipairs(lookup.chains) do
    state.chains[number] = open_chain(lookup.blocks, chain[1], chain[2])
  end
  if lookup.named[1] then
    weigh_named(state)
  elseif not weigh_some(state) then
    return TOO_MANY
  end
  local chosen = state.chosen
  if chosen > 0 then
    local chain = state.opened[state.row_at[chosen]].chain
    if chain and not is_in_hbm(lookup, chain, state.workers[chosen], state.depths[chosen]) then
      return NOT_IN_HBM
    end
  end
end
