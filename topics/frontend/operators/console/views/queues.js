export const Queues = () => null; export const Queue = () => null;
