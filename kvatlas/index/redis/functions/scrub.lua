-- budget costs: of a block, of each entry in a new value, of each entry that is found, and of each other number
local SCRUB_BLOCK, SCRUB_ENTRY, SCRUB_FOUND, SCRUB_OTHER = 1, 0.1, 0.3, 0.5

-- Parses a holders value. mine: {number of a holder -> its worker's index, a byte}. Returns the entries of these
-- holders (worker's index and flags, 2 bytes; the flags are 0 if this is not a proper holders value: entries of 4 bytes,
-- sorted, each number once), and the numbers of all other holders.
local function part_of(value, mine)
  local entries, count = entries_of(value)
  local found, others, right, before = {}, {}, #value % 4 == 0, -1
  if #value % 4 == 3 then
    entries[count + 1] = number_of(string.sub(value, -3)) * 256 -- an incomplete entry
  end
  for _, entry in ipairs(entries) do
    local flags = entry % 256
    local number = (entry - flags) / 256
    right = right and number > before
    before = number
    if mine[number] then
      found[#found + 1] = mine[number] .. string.char(flags)
    else
      others[#others + 1] = number
    end
  end
  for i = 1, right and 0 or #found do
    found[i] = string.sub(found[i], 1, 1) .. '\0'
  end
  return found, others
end

-- Adds what a scan returned, {hash, value...}, to what has been seen so far. Values repeat, so each is parsed once. Returns
-- the cost.
-- seen: {parted = {value -> {hashes, mine, others}}, see part_of; is_other = {number of another holder -> true};
--   others = {that holder...}; found = {hash, worker's index, flags, packed...}}
local function take_values(seen, flat, mine)
  local parted, is_other, others, found, cost = seen.parted, seen.is_other, seen.others, seen.found, SCRUB_BLOCK * #flat / 2
  for i = 1, #flat, 2 do
    local hash, value = flat[i], flat[i + 1]
    local entry = parted[value]
    if not entry then
      entry = { hashes = {} }
      entry.mine, entry.others = part_of(value, mine)
      parted[value] = entry
      cost = cost + SCRUB_ENTRY * #value / 4
      for _, number in ipairs(entry.others) do
        if not is_other[number] then
          is_other[number] = true
          others[#others + 1] = holder_bytes(number)
          cost = cost + SCRUB_OTHER
        end
      end
    end
    entry.hashes[#entry.hashes + 1] = hash
    cost = cost + SCRUB_FOUND * #entry.mine
    for _, mine_here in ipairs(entry.mine) do
      found[#found + 1] = hash .. mine_here
    end
  end
  return cost
end

-- Returns the set of those numbers among these holders that the store does not know; nil if it knows all of them.
local function unknown_among(key, holders)
  local unknown
  for first = 1, #holders, CHUNK do
    local last = math.min(first + CHUNK - 1, #holders)
    local entries = redis.call('HMGET', key, unpack(holders, first, last))
    for i = first, last do
      if not entries[i - first + 1] then
        unknown = unknown or {}
        unknown[number_of(holders[i])] = true
      end
    end
  end
  return unknown
end

-- Returns the hashes of the blocks that have an entry with an unknown number, or no entry at all.
local function strays_among(parted, unknown)
  local strays = {}
  for value, entry in pairs(parted) do
    local stray = value == '' or #value % 4 == 1 or #value % 4 == 2
    for _, number in ipairs(unknown and entry.others or {}) do
      stray = stray or unknown[number]
    end
    for _, hash in ipairs(stray and entry.hashes or {}) do
      strays[#strays + 1] = hash
    end
  end
  return strays
end

-- scrub: the entries of some workers' active holders in a part of one scope's blocks, and the workers' states at that moment.
--
-- KEYS 1 blocks of the scope
--      2 workers
--      3 holders
--      4 active
--      5 digests
--      6 steps
--      7 marked
-- ARGV 1 server on which the scrub began ('': here)
--      2 cursor
--      3 budget: the cost of what is looked at
--      4... workers
-- returns msgpack {server, next cursor, cost, {state or false...}, found, {hash...}}; {server} alone if this is another server,
--   where the cursor means nothing
--   state: see state_of
--   found: 10 bytes for each entry: hash, the worker's index (from 0), flags (0 if the value is not a holders value)
--   hash: of each block that has an entry with an unknown number, or no entry at all
register_read_only('kvatlas_scrub', function(keys, args)
  local blocks, began_on, cursor, budget, server = keys[1], args[1], args[2], integer(args[3], 0, MOST_SCRUB), server_id()
  if began_on ~= '' and began_on ~= server then
    return cmsgpack.pack({ server })
  end
  local states, mine = {}, {} -- mine: {number of an active holder -> its worker's index, a byte}
  for i = 4, #args do
    local state, holder = state_of(keys, 2, args[i])
    states[i - 3] = state
    if state then
      mine[number_of(holder)] = string.char(i - 4)
    end
  end
  local seen, blocks_seen, cost = { parted = {}, is_other = {}, others = {}, found = {} }, 0, STATE_COST * (#args - 3)
  repeat
    local flat
    cursor, flat = unpack(redis.call('HSCAN', blocks, cursor, 'COUNT', fields_to_scan(blocks_seen, cost, budget)))
    cost = cost + SCAN_COST + take_values(seen, flat, mine)
    blocks_seen = blocks_seen + #flat / 2
  until cursor == '0' or cost >= budget
  local strays = strays_among(seen.parted, unknown_among(keys[3], seen.others))
  return cmsgpack.pack({ server, cursor, math.ceil(cost), states, table.concat(seen.found), strays })
end, 3 + MOST_SCRUBBED)
