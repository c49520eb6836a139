-- The fold of one worker's messages. Its record is read in the same call, never trusted from the caller: a replay, a
-- zombie, a second owner change nothing.

-- self is one worker in the call: {c = the call, worker, record, uses}
-- c: see apply.lua

-- Carries out what is queued, of all workers.
local function flush(c)
  for _, scope in pairs(c.scopes) do
    if scope.queue[1] then
      change_blocks(scope, scope.queue, c.count)
      scope.queue = {}
    end
  end
end

local function digest_for(c, holder)
  local digest = c.digests[holder]
  if not digest then
    digest = digest_of(c.stored_digests[holder])
    c.digests[holder] = digest
  end
  return digest
end

-- The holder has blocks of this scope from now on: a sweep must look there.
local function touch(self, holder, scope_id)
  local touched = self.c.touched[holder] or ''
  local at = string.find(touched, scope_id, 1, true)
  while at and at % 16 ~= 1 do
    at = string.find(touched, scope_id, at + 1, true)
  end
  if not at then
    self.c.touched[holder] = touched .. scope_id .. self.uses[scope_id]
    self.c.newly_touched[holder] = true
  end
end

-- Blocks are changed later, those of several workers at once; one operation after the other where two may be of one block.
local function queue(self, holder, event, store)
  local scope_id, tier, flags = event[2], event[3], store and event[7] or 0
  local low, high = event[store and 8 or 5], event[store and 9 or 6] -- behind the wire's own fields
  local scope = self.c.scopes[scope_id]
  local op = scope.queue[#scope.queue]
  if op then
    if op.holder == holder and op.store == store and op.tier == tier and op.flags == flags then
      op.parts[#op.parts + 1] = event[4]
      op.told, op.low, op.high = op.told + #event[4] / 8, op.low + low, op.high + high
      return
    end
    if scope.in_order then
      flush(self.c)
    end
  end
  op = {
    scope = scope, holder = holder, tier = tier, tier_bit = 2 ^ tier, flags = flags, store = store, digest = digest_for(self.c, holder),
    parts = { event[4] }, told = #event[4] / 8, low = low, high = high, known = {},
  }
  scope.queue[#scope.queue + 1] = op
  if store then
    touch(self, holder, scope_id)
    if flags ~= 0 then
      for i = #op.digest + 1, ALL_WORDS do
        op.digest[i] = 0
      end
    end
  end
end

local function remember_parents(self, event)
  local side = self.c.scopes[event[2]].side
  if side then
    local parent = event[5] or ''
    for _, hash in ipairs(split(event[4])) do
      link(side, hash, parent)
      parent = hash
    end
  end
end

local function same_digest(a, b)
  for i = 1, DIGEST_WORDS do
    if a[i] ~= b[i] then
      return false
    end
  end
  return true
end

local function want(record, incarnation, seq)
  if below(record[WANT_INC], incarnation) then
    record[WANT_INC], record[WANT_SEQ] = incarnation, seq
  elseif record[WANT_INC] == incarnation and record[WANT_SEQ] < seq then
    record[WANT_SEQ] = seq
  end
end

local function close(self)
  close_worker(self.c.k, self.record, self.worker)
end

-- No memory, or no holder number: it is told anew when there is room.
local function close_without_room(self)
  self.record[OOM] = 1
  close(self)
  return false
end

-- What one event does; each returns false where the worker was closed.
local act = {}

act[CODE.stored] = function(self, event)
  local record = self.record
  local holder = record[LOADING] ~= '' and record[LOADING] or record[ACTIVE]
  if self.c.oom then
    return close_without_room(self)
  end
  if holder == '' then
    close(self)
    return false
  end
  queue(self, holder, event, true)
  remember_parents(self, event)
  return true
end

act[CODE.chunk] = function(self, event)
  if self.record[LOADING] == '' then
    close(self)
    return false
  end
  self.record[CHUNKS] = self.record[CHUNKS] + 1
  return act[CODE.stored](self, event)
end

act[CODE.removed] = function(self, event)
  local record = self.record
  local holder = record[LOADING] ~= '' and record[LOADING] or record[ACTIVE]
  if holder == '' then
    close(self)
    return false
  end
  queue(self, holder, event, false)
  return true
end

act[CODE.cleared] = function(self)
  local record, k = self.record, self.c.k
  local slot, state = ACTIVE, 'a'
  if record[LOADING] ~= '' then
    slot, state = LOADING, 'l'
  end
  retire_holder(k, record[slot], self.worker)
  record[slot] = allocate(k, state, self.worker, self.c.reuse_ms) or ''
  return record[slot] ~= '' or close_without_room(self)
end

act[CODE.begin] = function(self)
  local record, k = self.record, self.c.k
  if record[SEQ] ~= 0 then -- only the first message of an incarnation begins a snapshot
    close(self)
    return false
  end
  retire_holder(k, record[LOADING], self.worker)
  record[LOADING] = allocate(k, 'l', self.worker, self.c.reuse_ms) or ''
  record[CHUNKS] = 0
  return record[LOADING] ~= '' or close_without_room(self)
end

act[CODE.ending] = function(self, event)
  flush(self.c)
  local record, k = self.record, self.c.k
  if record[LOADING] == '' then
    close(self)
    return false
  end
  if record[CHUNKS] ~= event[2] or not same_digest(digest_for(self.c, record[LOADING]), event[3]) then
    -- what the last incarnation told goes on answering until the next one is whole
    self.c.count.failed_checks = self.c.count.failed_checks + 1
    retire_holder(k, record[LOADING], self.worker)
    record[LOADING], record[BAD], record[CLOSED] = '', 1, 1
    return false
  end
  retire_holder(k, record[ACTIVE], self.worker)
  activate_holder(k, record[LOADING], self.worker)
  record[ACTIVE], record[LOADING] = record[LOADING], ''
  return true
end

act[CODE.checkpoint] = function(self, event)
  flush(self.c)
  local record = self.record
  local holder = record[LOADING] ~= '' and record[LOADING] or record[ACTIVE]
  if holder == '' or not same_digest(digest_for(self.c, holder), event[2]) then
    self.c.count.failed_checks = self.c.count.failed_checks + 1
    record[BAD] = 1
  end
  return true
end

-- The fence: are these consecutive messages (first seq to last seq, which say the same thing) the next ones of the newest
-- incarnation? Where the record stands inside them, telling the first ones again changes nothing: see apply_call.py.
local function fold(self, incarnation, first, last, events)
  local record, count, messages = self.record, self.c.count, last - first + 1
  if incarnation ~= record[INC] then
    if below(incarnation, record[INC]) then
      count.stale = count.stale + messages
      return
    end
    if first ~= 0 or not events[1] or events[1][1] ~= CODE.begin then
      want(record, incarnation, last)
      count.gaps = count.gaps + messages
      return
    end
    record[INC], record[BAD], record[CLOSED], record[OOM] = incarnation, 0, 0, 0
    count.applied = count.applied + messages
  else
    if last <= record[SEQ] then
      count.duplicates = count.duplicates + messages
      return
    end
    if record[CLOSED] == 1 then
      want(record, incarnation, last)
      count.refused = count.refused + messages
      return
    end
    if first > record[SEQ] + 1 then
      want(record, incarnation, last)
      count.gaps = count.gaps + messages
      return
    end
    count.duplicates = count.duplicates + record[SEQ] + 1 - first
    count.applied = count.applied + last - record[SEQ]
  end
  record[SEQ] = last
  for i = 1, #events do
    if not act[events[i][1]](self, events[i]) then
      return
    end
  end
end
